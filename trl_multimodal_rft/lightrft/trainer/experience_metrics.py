# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of experience, over the samples of all ranks."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object

from ...algorithms.critic import explained_variance
from ...rollout.rollout import Rollout
from .experience import Experience, info_of
from .experience_maker import NaiveExperienceMaker
from .replay_buffer_utils import BufferItem


_LOGGED_INFO = ("reward", "shaped_reward", "return", "soft_overlong_punishment", "response_length", "truncated", "kl")


def mean(numbers: torch.Tensor | list[float]) -> float:
    """Returns the mean of the numbers that aren't `NaN`."""
    return torch.as_tensor(numbers, dtype=torch.float64).nanmean().item()


def standard_deviation(numbers: torch.Tensor) -> float:
    """Returns the population standard deviation of the numbers that aren't `NaN`."""
    return math.sqrt(mean((numbers - mean(numbers)).square()))


def gather_metrics(batches: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Concatenates a metric's numbers of all batches and ranks, in float64 on the CPU. A batch may lack a metric."""
    local: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for batch in batches:
        for name, numbers in batch.items():
            if isinstance(numbers, (list, tuple)):
                numbers = [math.nan if number is None else number for number in numbers]
            local[name].append(torch.as_tensor(numbers, dtype=torch.float64).flatten().cpu())
    gathered = gather_object([{name: torch.cat(parts) for name, parts in local.items()}])
    names = sorted(set().union(*gathered))
    return {name: torch.cat([rank[name] for rank in gathered if name in rank]) for name in names}


def buffer_statistics(items: list[BufferItem], rollout: Rollout) -> dict[str, float]:
    """
    Returns statistics of all ranks' buffers, such as `returns_mean`. Statistics of values, advantages and returns
    leave out samples without a reward. Without a critic, the samples have no values.
    """
    mask = rollout.loss_mask.bool()
    is_rewarded = mask & rollout.rewards.scorable.bool()[:, None]
    local_metrics = {
        "step_reward": torch.tensor([item.reward for item in items]),
        "response_length": mask.sum(1),
        "advantages": rollout.advantages[is_rewarded],
        "returns": rollout.values.returns[is_rewarded],
    }
    divergences = [(item.info or {}).get("kl") for item in items]  # means of completions
    if all(divergence is not None for divergence in divergences):
        local_metrics["kl"] = torch.tensor(divergences).repeat_interleave(mask.sum(1).cpu())
    if rollout.values.old is not None:
        local_metrics["values"] = rollout.values.old[is_rewarded]
    numbers = {name: values[~values.isnan()] for name, values in gather_metrics([local_metrics]).items()}
    statistics = {name: mean(numbers[name]) for name in ("kl", "values") if name in numbers}
    for name in ("step_reward", "response_length", "advantages", "returns"):
        values = numbers[name]
        if len(values):
            moments = {"mean": mean(values), "std": standard_deviation(values)}
            moments |= {"min": values.min().item(), "max": values.max().item()}
            statistics |= {f"{name}_{key}": moment for key, moment in moments.items()}
    if rollout.values.old is not None:
        values = numbers["values"]
        returns = numbers["returns"]
        statistics["explained_variance"] = explained_variance(values, returns, torch.ones_like(values)).item()
    return statistics


def rollout_logs(experiences: list[Experience]) -> dict[str, float]:
    """Returns means of the logged metrics over the samples of all ranks, and the standard deviation of rewards."""
    metrics = []
    for info in map(info_of, experiences):
        metrics.append(info.get("reward_metrics", {}) | {name: info[name] for name in _LOGGED_INFO if name in info})
    numbers = gather_metrics(metrics)
    means = {name: mean(values) for name, values in numbers.items()}
    return {**means, "reward_std": standard_deviation(numbers["reward"])}


def evaluation_logs(
    maker: NaiveExperienceMaker,
    batches: Iterable[list[dict[str, Any]]],
    options: dict[str, Any],
    surplus: Iterable[list[dict[str, Any]]],
) -> dict[str, float]:
    """
    Samples and rewards completions for batches of rows. Samples completions of `surplus` batches, too, without effect.
    Returns metrics, see [`PPOTrainerVL.evaluate`].
    """
    metrics = []
    for rows in batches:
        for samples in maker.generate_samples(rows, **options):
            rewards, reward_metrics = maker.rewards(samples)
            metrics.append({**reward_metrics, "reward": rewards, "response_length": samples.response_length})
    for rows in surplus:
        maker.generate_samples(rows, **options)
    numbers = gather_metrics(metrics)
    means = {f"{name}_mean": mean(values) for name, values in numbers.items()}
    std = standard_deviation(numbers["reward"])
    return {**means, "reward_std": std, "num_samples": len(numbers["reward"])}
