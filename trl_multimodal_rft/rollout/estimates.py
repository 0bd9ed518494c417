# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sums of rewards, advantages and metrics, computed from the rewards of all ranks."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from trl.trainer.utils import nanstd

from ..algorithms.advantages import group_statistics, rloo
from ..algorithms.metrics import Metric, deviation, nan_mean
from ..algorithms.returns import Step, Steps
from ..algorithms.signal import causes_by_reward
from ..rewards.calls import StepwiseReward
from .ranks import local_rows
from .rollout import RewardValues, Rollout, Source, Turn, Values


logger = get_logger(__name__)

# Added to standard deviations before divisions, as in TRL
_EPS = 1e-4

# Mean rewards are logged for this many turns of a completion, from the first turn on
_SHOWN_TURNS = 8


def rewards_per_func(rewards: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """Returns the rewards of completions by function, `(N, F)`, NaN for `None`."""
    return torch.tensor([[torch.nan if reward is None else reward for reward in row] for row in rewards])


def rewards_by_turn(rewards: Sequence[Sequence[float | None]], turns: Sequence[Sequence[Turn]]) -> torch.Tensor:
    """
    Returns the sums of stepwise rewards in each of the first turns, `(N, F, turns)`, NaN where a function gives none.
    """
    turn_sums = torch.full((len(rewards), len(rewards[0]), _SHOWN_TURNS), torch.nan)
    for sums, completion_rewards, completion_turns in zip(turn_sums, rewards, turns, strict=True):
        for i, reward in enumerate(completion_rewards):
            if not isinstance(reward, StepwiseReward):
                continue
            for end, step_reward in reward.steps:
                turn = bisect_right(completion_turns, end, key=lambda item: item.stop)
                if turn < _SHOWN_TURNS:
                    sums[i, turn] = sums[i, turn].nan_to_num(0.0) + step_reward
    return turn_sums


def reward_metrics(
    rewards_per_func: torch.Tensor,
    names: Sequence[str],
    rewards: torch.Tensor,
    is_std_zero: torch.Tensor,
    held_out: Collection[str] = (),
) -> dict[str, Metric]:
    """
    Returns TRL's metrics of rewards of all ranks, with another prefix for functions that aren't trained on. Shapes:
    `rewards_per_func` `(N, F)`, the others `(N,)`.
    """
    metrics = {}
    for i, name in enumerate(names):
        mean = nan_mean(rewards_per_func[:, i], is_of_all_ranks=True)
        std = deviation(rewards_per_func[:, i])
        if name in held_out:
            metrics |= {f"held_out_rewards/{name}/mean": mean, f"held_out_rewards/{name}/std": std}
        else:
            metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    metrics["reward"] = nan_mean(rewards, is_of_all_ranks=True)
    metrics["reward_std"] = deviation(rewards)
    return {**metrics, "frac_reward_zero_std": nan_mean(is_std_zero, is_of_all_ranks=True)}


def turn_metrics(rewards: torch.Tensor, names: Sequence[str]) -> dict[str, Metric]:
    """Returns the mean rewards of the first turns, from rewards `(N, F, turns)` of all ranks, NaN for no reward."""
    metrics: dict[str, Metric] = {}
    for i, name in enumerate(names):
        for turn, values in enumerate(rewards[:, i].unbind(1), start=1):
            if not values.isnan().all():
                metrics |= {f"rewards/{name}/turn_{turn}": nan_mean(values, is_of_all_ranks=True)}
    return metrics


def warn_of_unscorable(rewards: Sequence[Sequence[float | None]], names: Collection[str], source: Source) -> None:
    """Warns of the first row with a completion without reward. Completions whose environment failed don't count."""
    completions = zip(rewards, source.row_indices, source.failures, strict=True)
    row = next((row for values, row, error in completions if error is None and {*values} == {None}), None)
    if row is not None:
        logger.warning(
            f"All reward functions returned None for the following kwargs: those of a completion of row {row} "
            f"({', '.join(map(repr, names))}), which isn't trained on. Return a number from one of the functions, or "
            "remove the row."
        )


# Functions of the rewards of all ranks


class Estimates(NamedTuple):
    """Advantages of the completions of all ranks, `(N,)` or `(N, C)`, with flags of their groups, `(N,)`."""

    advantages: torch.Tensor
    has_signal: torch.Tensor
    is_std_zero: torch.Tensor  # for TRL's metric
    values: Values | None = None  # of this rank, with a critic
    scorable: torch.Tensor | None = None  # (N,) of this rank, with a critic: 0 where no reward function applies


def weighted_sum(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, bonus: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Returns the reward of each completion, `(N,)`: the weighted sum of its rewards by function, `(N, F)`, plus its
    bonus, `(N,)`. The reward is NaN if every function returned `None`.
    """
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    rewards = rewards if bonus is None else rewards + bonus
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def join_steps(
    rewards: Sequence[Sequence[float | None]],
    turns: Sequence[Sequence[tuple[int, str]]],
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    bonus: torch.Tensor | None = None,
) -> Steps:
    """
    Returns the steps of completions, which end with a turn or a stepwise reward; steps in equal states have equal ids.
    `turns` are pairs of the index after the last token and the state. An outcome is `bonus` `(N,)` plus the weighted
    `rewards_per_func` `(N, F)` of functions that aren't stepwise.
    """
    step_lists = []
    state_ids: dict[str | None, int] = {}
    weights = weights.cpu().double()
    for row, completion_turns in zip(rewards, turns, strict=True):
        # For each function, its stepwise rewards by the step's last token
        stepwise = [dict(item.steps) if isinstance(item, StepwiseReward) else {} for item in row]
        steps = []
        for end in sorted({stop - 1 for stop, _ in completion_turns}.union(*stepwise)):
            turn = bisect_right(completion_turns, end, key=lambda item: item[0])
            values = [
                weight * item[end] for weight, item in zip(weights.tolist(), stepwise, strict=True) if end in item
            ]
            state = state_ids.setdefault(completion_turns[turn][1], len(state_ids))
            steps.append(Step(end, turn, sum(values) if values else None, state))
        # A completion without tokens has a step, too, as its outcome is compared with the outcomes of others
        step_lists.append(steps or [Step(-1, 0, None, state_ids.setdefault(None, len(state_ids)))])
    is_stepwise = torch.tensor([[isinstance(item, StepwiseReward) for item in row] for row in rewards])
    outcomes = weighted_sum(rewards_per_func.cpu().double().masked_fill(is_stepwise, torch.nan), weights)
    outcomes = outcomes if bonus is None else outcomes.nan_to_num(0.0) + bonus.cpu().double()
    return Steps(step_lists, outcomes)


def has_signal(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Returns whether rewards differ within each completion's group. Shapes: both `(N,)`; returns `(N,)`."""
    statistics = group_statistics(rewards, group_ids)
    return statistics.has_signal[statistics.index].to(rewards.device)


def out_of_range(rewards: torch.Tensor, group_ids: torch.Tensor, bounds: Sequence[float]) -> torch.Tensor:
    """
    Returns -1 where the mean reward of a completion's group is at or below the lower bound, 1 where it is at or above
    the upper bound, and 0 between the bounds, or where the group has no reward. Shapes: both `(N,)`; returns `(N,)`.
    """
    statistics = group_statistics(rewards, group_ids)
    total = torch.zeros_like(statistics.count).index_add(0, statistics.index, rewards.cpu().double().nan_to_num(0.0))
    means = (total / statistics.count)[statistics.index]
    low, high = bounds
    return ((means >= high).long() - (means <= low).long()).to(rewards.device)


def normalize_then_sum(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, group_ids: torch.Tensor, group_size: int
) -> Estimates:
    """
    Returns advantages as TRL's `multi_objective_aggregation="normalize_then_sum"`: `rewards_per_func` `(N, F)`
    normalized per function and group, summed by `weights`, and normalized over the batch; 0 in groups of equal
    rewards.
    """
    grouped = rewards_per_func.view(-1, group_size, rewards_per_func.size(1))  # (groups, group_size, F)
    mean = grouped.nanmean(dim=1, keepdim=True)
    std = nanstd(grouped, dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(mean)
    rewards = weighted_sum(((grouped - mean) / (std + _EPS)).view_as(rewards_per_func), weights)
    rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
    std = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    advantages = ((rewards - rewards.nanmean()) / (std + _EPS)).nan_to_num(nan=0.0)
    signal = torch.stack([has_signal(column, group_ids) for column in rewards_per_func.T]).any(0)
    return Estimates(torch.where(signal, advantages, 0), signal, std.isclose(torch.zeros_like(std)))


def lost_by_reward(
    estimates: Estimates, rewards: torch.Tensor, shaped: torch.Tensor, group_ids: torch.Tensor, compares_groups: bool
) -> torch.Tensor:
    """
    Returns what took the signal from completions before the loss, see [`~algorithms.signal.causes_by_reward`]. If the
    estimator doesn't compare groups, rewards are compared over the batch, and equal ones may have advantages. Shapes:
    `rewards`, `shaped` and `group_ids` `(N,)`; returns `(N,)`.
    """
    if compares_groups:
        compared = group_ids
        signal = estimates.has_signal
    else:
        compared = torch.zeros_like(group_ids)
        signal = (estimates.advantages.view(len(rewards), -1) != 0).any(1)
    return causes_by_reward(rewards, signal, has_signal(rewards, compared), has_signal(shaped, compared))


def with_estimates(
    rollout: Rollout,
    estimates: Estimates,
    causes: torch.Tensor,
    outside: torch.Tensor | None,
    accelerator: Accelerator,
) -> Rollout:
    """
    Returns a rollout with the estimates of this rank's completions. `causes` took the signal from completions, and
    `outside` says whether the mean reward of a group is out of the wanted range. Shapes: both `(N,)` of all ranks.
    """
    advantages, signal = (local_rows(accelerator, rows, len(rollout)) for rows in estimates[:2])
    advantages = advantages if advantages.dim() == 1 else advantages[:, : rollout.completion_ids.size(1)]
    rewards = RewardValues(
        has_signal=signal,
        causes=local_rows(accelerator, causes, len(rollout)),
        out_of_range=None if outside is None else local_rows(accelerator, outside, len(rollout)),
        scorable=estimates.scorable,
    )
    return replace(rollout, advantages=advantages, rewards=rewards, values=estimates.values or Values())


def signal_of_steps(advantages: torch.Tensor, rewards: torch.Tensor, group_ids: torch.Tensor) -> Estimates:
    """
    Returns stepwise advantages with the flags of their groups. A group has signal if any advantage isn't 0. Sums of
    rewards don't decide this: completions with equal sums may have advantages, and completions with different sums may
    have none. Shapes: `rewards` `(N,)`.
    """
    signal = torch.isin(group_ids, group_ids[advantages.view(len(advantages), -1).any(1)])
    return Estimates(advantages, signal, ~signal & ~rewards.isnan())


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor, normalize: bool) -> torch.Tensor:
    """
    Returns TRL's advantages of RLOO: a completion's reward minus the mean reward of the group's other completions,
    normalized over the batch if `normalize`. A completion without a reward, or with its group's only reward, gets 0.
    Shapes: both `(N,)`; returns `(N,)`.
    """
    advantages = rloo(rewards, group_ids)
    if not normalize:
        return advantages
    statistics = group_statistics(rewards, group_ids)
    is_counted = ~rewards.isnan() & (statistics.count[statistics.index] > 1).to(rewards.device)
    counted = advantages.masked_fill(~is_counted, torch.nan)
    return ((counted - counted.nanmean()) / (nanstd(counted) + _EPS)).nan_to_num(nan=0.0)


def is_std_zero(rewards: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    """Returns whether the standard deviation that TRL divides by is 0. Shapes: `rewards` `(N,)`; returns `(N,)`."""
    if scale == "batch":
        std = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    elif group_size > 1:
        std = nanstd(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size)
    else:
        std = torch.zeros_like(rewards)
    return std.isclose(torch.zeros_like(std))
