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
    # A single option is `generation_batch_size`, which counts all processes already
    return math.prod(getattr(config, name) for name in names) * (config.world_size if len(names) > 1 else 1)


def check_batches(config, names: list[str]) -> None:
    """
    Raises a `ValueError` if the size of a batch isn't a multiple of `num_generations`. The error names the arguments
    whose product is the size, while TRL's error names only the size. `names` is the result of [`batch_options`].
    """
    size = config.generation_batch_size
    group_size = config.num_generations
    n_processes = config.world_size
    if config.do_eval and config.eval_strategy != "no":
        name = "per_device_eval_batch_size"
        eval_group_size = config.num_generations_eval or group_size
        n_rows = getattr(config, name) * n_processes
        if n_rows % eval_group_size != 0:
            raise ValueError(
                f"{_product(config, [name], n_processes)} must be a multiple of `num_generations"
                f"{'_eval' if config.num_generations_eval else ''}={eval_group_size}`, so that prompts keep all their "
                f"completions. Set `{name}={_multiple(getattr(config, name), eval_group_size, n_processes)}`."
            ) from None
    if size is None or size % group_size == 0:
        return
    if len(names) == 1:
        # A valid size is a multiple of the group size, and of a micro-batch over all processes
        unit = math.lcm(group_size, config.per_device_train_batch_size * n_processes)
        raise ValueError(
            f"`generation_batch_size={size}` must be a multiple of `num_generations={group_size}`, so that prompts "
            f"keep all their completions. Set `generation_batch_size={_multiple(size, unit, 1)}`."
        ) from None
    # Raise one of the factors, or lower the group size to a divisor of the batch
    remedies = [
        f"`{name}={_multiple(getattr(config, name), group_size, size // getattr(config, name))}`" for name in names
    ]
    smaller_group_size = max(divisor for divisor in range(1, min(size, group_size) + 1) if size % divisor == 0)
    remedies += [f"`num_generations={smaller_group_size}`"] if smaller_group_size > 1 else []
    raise ValueError(
        f"{_product(config, names, n_processes)} must be a multiple of "
        f"`num_generations={group_size}`, so that prompts keep all their completions. Set {' or '.join(remedies)}."
    ) from None


def _product(config: BatchConfig, names: list[str], n_processes: int) -> str:
    factors = [f"`{name}={getattr(config, name)}`" for name in names] + [f"{n_processes} processes"] * (
        n_processes > 1
    )
    return " x ".join(factors)


def _multiple(value: int, divisor: int, factor: int) -> int:
    """
    Returns the smallest number, at least `value`, that makes a multiple of `divisor` when multiplied by `factor`. For
    example, `_multiple(3, 8, 2)` is 4, because 3 * 2 isn't a multiple of 8, and 4 * 2 is.
    """
    step = divisor // math.gcd(divisor, factor)
    return -(-value // step) * step
