# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From rewards of all ranks' completions to advantages."""

from collections.abc import Sequence

import torch
from trl.trainer.utils import nanstd

from ..algorithms.advantages import group_statistics, rloo


# What TRL adds to standard deviations
_EPS = 1e-4


def weighted_sum(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, bonus: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Reward of each completion, `(N,)`, from those of the functions, `(N, F)`, and its bonus, `(N,)`; NaN where no
    function applies.
    """
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    rewards = rewards if bonus is None else rewards + bonus
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def has_signal(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Whether the rewards differ within each completion's group. Shapes: both `(N,)`; returns `(N,)`."""
    statistics = group_statistics(rewards, group_ids)
    return statistics.live[statistics.index].to(rewards.device)


def out_of_range(rewards: torch.Tensor, group_ids: torch.Tensor, bounds: Sequence[float]) -> torch.Tensor:
    """
    Where the mean reward of each completion's group is: -1 at or below the lower bound, 1 at or above the upper one, 0
    between them, or where none can be scored. Shapes: both `(N,)`; returns `(N,)`.
    """
    statistics = group_statistics(rewards, group_ids)
    total = torch.zeros_like(statistics.count).index_add(0, statistics.index, rewards.cpu().double().nan_to_num(0.0))
    means, (low, high) = (total / statistics.count)[statistics.index], bounds
    return ((means >= high).long() - (means <= low).long()).to(rewards.device)


def normalize_then_sum(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, group_ids: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Rewards normalized per function and group, summed, then normalized over the batch, as TRL does for
    `multi_objective_aggregation="normalize_then_sum"`; 0 in groups in which no function's rewards differ.

    Shapes: `rewards_per_func` `(N, F)`; returns advantages, whether there is signal, and whether the standard
    deviation is 0, each `(N,)`.
    """
    grouped = rewards_per_func.view(-1, group_size, rewards_per_func.size(1))
    mean = grouped.nanmean(dim=1, keepdim=True)
    std = nanstd(grouped, dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(mean)
    rewards = weighted_sum(((grouped - mean) / (std + _EPS)).view_as(rewards_per_func), weights)
    rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
    std = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    advantages = ((rewards - rewards.nanmean()) / (std + _EPS)).nan_to_num(nan=0.0)
    live = torch.stack([has_signal(column, group_ids) for column in rewards_per_func.T]).any(0)
    return torch.where(live, advantages, 0), live, std.isclose(torch.zeros_like(std))


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor, normalize: bool) -> torch.Tensor:
    """
    TRL's advantages of RLOO: reward minus the mean of the others of its group, normalized over the batch if wanted; 0
    for completions that can't be scored, or alone can. Shapes: both `(N,)`; returns `(N,)`.
    """
    advantages = rloo(rewards, group_ids)
    if not normalize:
        return advantages
    statistics = group_statistics(rewards, group_ids)
    counted = ~rewards.isnan() & (statistics.count[statistics.index] > 1).to(rewards.device)
    counted = advantages.masked_fill(~counted, torch.nan)
    return ((counted - counted.nanmean()) / (nanstd(counted) + _EPS)).nan_to_num(nan=0.0)


def is_std_zero(rewards: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    """Whether the standard deviation that TRL would divide by is 0. Shapes: `rewards` `(N,)`; returns `(N,)`."""
    if scale == "batch":
        std = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    elif group_size > 1:
        std = nanstd(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size)
    else:
        std = torch.zeros_like(rewards)
    return std.isclose(torch.zeros_like(std))
