# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sizes of generation batches. This module has no heavy imports, so commands can check sizes early."""

import math
from typing import Protocol


class BatchConfig(Protocol):
    """Options of a config or a command line that decide the size of a generation batch."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    generation_batch_size: int | None
    steps_per_generation: int | None

    @property
    def world_size(self) -> int: ...


def batch_options(config: BatchConfig) -> list[str]:
    """Returns the names of the options whose product over all processes is the size of a generation batch."""
    if config.generation_batch_size is not None:
        return ["generation_batch_size"]
    steps = "gradient_accumulation_steps" if config.steps_per_generation is None else "steps_per_generation"
    return ["per_device_train_batch_size", steps]


def batch_size(config: BatchConfig) -> int:
    """Returns the number of completions of a generation batch over all processes."""
    names = batch_options(config)
    return math.prod(getattr(config, name) for name in names) * (config.world_size if len(names) > 1 else 1)


def check_batches(config, names: list[str]) -> None:
    """
    Raises a `ValueError` if the size of a batch isn't a multiple of `num_generations`. The error names the arguments
    whose product is the size, while TRL's error names only the size.
    """
    size, group, processes = config.generation_batch_size, config.num_generations, config.world_size
    if config.do_eval and config.eval_strategy != "no":
        name, group_eval = "per_device_eval_batch_size", config.num_generations_eval or group
        rows = getattr(config, name) * processes
        if rows % group_eval != 0:
            raise ValueError(
                f"{_product(config, [name], processes)} must be a multiple of `num_generations"
                f"{'_eval' if config.num_generations_eval else ''}={group_eval}`, so that prompts keep all their "
                f"completions. Set `{name}={_multiple(getattr(config, name), group_eval, processes)}`."
            ) from None
    if size is None or size % group == 0:
        return
    if len(names) == 1:
        unit = math.lcm(group, config.per_device_train_batch_size * processes)
        raise ValueError(
            f"`generation_batch_size={size}` must be a multiple of `num_generations={group}`, so that prompts keep "
            f"all their completions. Set `generation_batch_size={_multiple(size, unit, 1)}`."
        ) from None
    sizes = [f"`{name}={_multiple(getattr(config, name), group, size // getattr(config, name))}`" for name in names]
    smaller = max(divisor for divisor in range(1, min(size, group) + 1) if size % divisor == 0)
    sizes += [f"`num_generations={smaller}`"] if smaller > 1 else []
    raise ValueError(
        f"{_product(config, names, processes)} must be a multiple of "
        f"`num_generations={group}`, so that prompts keep all their completions. Set {' or '.join(sizes)}."
    ) from None


def _product(config, names: list[str], processes: int) -> str:
    factors = [f"`{name}={getattr(config, name)}`" for name in names] + [f"{processes} processes"] * (processes > 1)
    return " x ".join(factors)


def _multiple(value: int, group: int, others: int) -> int:
    """Returns the smallest number, at least `value`, whose product with `others` is a multiple of `group`."""
    step = group // math.gcd(group, others)
    return -(-value // step) * step
