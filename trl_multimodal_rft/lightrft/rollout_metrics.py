# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Numbers about samples of all processes."""

import torch
from accelerate.utils import gather_object

from .experience import Experience


# What the experience maker knows about a sample
_LOGGED = ("reward", "return", "soft_overlong_punishment", "response_length", "truncated", "kl")


def of_all_processes(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Joins lists of all processes, each of which may have names of its own."""
    gathered = gather_object([values])
    names = sorted({name for each in gathered for name in each})
    return {name: [number for each in gathered for number in each.get(name, [])] for name in names}


def mean(numbers: list[float], weights: list[float] | None = None) -> float:
    """Mean of the numbers that are known (not `NaN`); with weights, what counts nothing may be anything."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if weights is None:
        return values.nanmean().item()
    counts = torch.tensor(weights, dtype=torch.float64)
    return (torch.where(counts > 0, values * counts, 0).sum() / counts.sum()).item()


def std(numbers: list[float]) -> float:
    """Standard deviation, that of the population, of the numbers that are known."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return (values - values.nanmean()).square().nanmean().sqrt().item()


def rollout_logs(experiences: list[Experience]) -> dict[str, float]:
    """Means over the samples of all processes."""
    values: dict[str, list[float]] = {}
    for info in (experience.info for experience in experiences):
        logged = {name: info[name] for name in _LOGGED if name in info} | info.get("reward_metrics", {})
        if "raw_reward" in info:
            logged |= {"reward": info["raw_reward"], "shaped_reward": info["reward"]}
        for name, numbers in logged.items():
            values.setdefault(name, []).extend(torch.as_tensor(numbers).flatten().tolist())
    values = of_all_processes(values)
    return {name: mean(numbers) for name, numbers in values.items()} | {"reward_std": std(values["reward"])}
