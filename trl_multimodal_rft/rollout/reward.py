# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards of a rollout's completions, and what is computed of those of all ranks."""

from asyncio import AbstractEventLoop
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerState
from trl.trainer.utils import is_async_callable, nanstd

from ..algorithms.advantages import group_statistics, rloo
from ..algorithms.returns import Step, Steps
from ..data.reading.refs import iter_refs
from ..data.reading.rules import MediaRules
from ..data.rows.features import restore_media
from ..rewards.calls import call_rewards, reward_arguments
from ..rewards.checks import StepwiseReward, checked_reward
from ..rewards.model import read_as_text
from .rollout import EarlyRewards, Rollout, Source, Turn


logger = get_logger(__name__)

# What TRL adds to standard deviations
_EPS = 1e-4

# First turns of completions whose mean rewards are logged
_SHOWN_TURNS = 8


class EarlyCalls:
    """
    Calls functions one by one, each of them, as they use so many connections as they were told. After an error, it
    raises that one again.
    """

    def __init__(self):
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._failure: BaseException | None = None

    def __call__(self, name: str, function: Callable, **arguments: Any) -> Any:
        with self._locks[name]:
            if self._failure is not None:
                raise self._failure
            try:
                return function(**arguments)
            except BaseException as error:
                self._failure = error
                raise


def checked_functions(
    rollout: Rollout,
    names: Sequence[str],
    reward_funcs: Sequence[Any],
    processors: Sequence[Any],
    template_kwargs: dict[str, Any],
    media_rules: MediaRules,
) -> dict[str, Callable]:
    """Reward functions by name, whose arguments and results are checked; models of text read completions as text."""
    readers = [name for name, each in zip(names, reward_funcs, strict=True) if isinstance(each, nn.Module)]
    check_readers(readers, rollout.source.messages, rollout.source.completions)
    noted = {"failures": rollout.source.failures}
    reward_funcs = [partial(each, **noted) if hasattr(each, "notes_failures") else each for each in reward_funcs]
    return {
        name: checked_reward(
            read_as_text(each, processor, template_kwargs) if name in readers else each,
            name,
            media_rules,
            rollout.source.row_indices,
            [[(turn.start, turn.stop) for turn in turns] for turns in rollout.source.sampled_turns],
        )
        for name, each, processor in zip(names, reward_funcs, processors, strict=True)
    }


def rollout_arguments(rollout: Rollout, kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Arguments of reward functions, as TRL passes them; media are as the dataset has them. There are also `group_ids`,
    unless a group straddles ranks.
    """
    rows = [
        {**row, **{key: each[i] if isinstance(each, list) else each for key, each in rollout.source.extra.items()}}
        for i, row in enumerate(rollout.source.rows)
    ]
    if rollout.source.environments is not None:
        rows = [{**row, "environments": each} for row, each in zip(rows, rollout.source.environments, strict=True)]
    prompts, completions = restore_media(rollout.source.messages), restore_media(rollout.source.completions)
    groups = {"group_ids": rollout.group_ids.tolist()} if rollout.source.whole_groups else {}
    return {**reward_arguments(prompts, completions, rollout.source.ids, rows), **groups, **kwargs}


def only_waits(reward_func: Callable) -> bool:
    """
    Whether a thread may call a function while the policy is trained: it is async, or has a true `only_waits`, as those
    that ask servers. Others may use collectives, signals or the device.
    """
    return is_async_callable(reward_func) or getattr(reward_func, "only_waits", False)


def reward_early(
    rollout: Rollout,
    functions: Mapping[str, Callable],
    state: TrainerState,
    loop: AbstractEventLoop | None,
    calls: EarlyCalls,
) -> EarlyRewards:
    """Calls reward functions in a thread of their own. What they log is kept."""
    logged: list[tuple[str, str, Any]] = []
    logs = {key: partial(lambda *entry: logged.append(entry), key) for key in ("log_extra", "log_metric")}
    arguments = rollout_arguments(rollout, {"trainer_state": state, **logs})
    one_by_one = {name: partial(calls, name, each) for name, each in functions.items() if not is_async_callable(each)}
    return EarlyRewards(call_rewards({**functions, **one_by_one}, arguments, loop), logged)


def reward_rollout(
    rollout: Rollout,
    functions: Mapping[str, Callable],
    kwargs: dict[str, Any],
    loop: AbstractEventLoop | None,
    profile: Callable[[str], Any] = nullcontext,
    early: EarlyRewards | None = None,
) -> dict[str, list[float | None]]:
    """
    Calls reward functions as TRL does, with further `kwargs`, but for those that were called early; media are as in
    the dataset. Returns the rewards of completions by function, `None` where the environment failed.
    """
    arguments, early = rollout_arguments(rollout, kwargs), early or EarlyRewards({}, [])
    for key, *what in early.logged:
        kwargs[key](*what)
    called = {name: each for name, each in functions.items() if name not in early.values}
    found = call_rewards(called, arguments, loop, profile) | early.values
    kept = [error is None for error in rollout.source.failures]
    return {name: [each if keep else None for each, keep in zip(found[name], kept, strict=True)] for name in functions}


def rewards_per_func(rewards: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """Rewards of completions by function, `(N, F)`, NaN for `None`."""
    return torch.tensor([[torch.nan if each is None else each for each in row] for row in rewards])


def rewards_by_turn(rewards: Sequence[Sequence[float | None]], turns: Sequence[Sequence[Turn]]) -> torch.Tensor:
    """Sums of the rewards in each of the first turns, `(N, F, turns)`; NaN where a function doesn't give any."""
    found = torch.full((len(rewards), len(rewards[0]), _SHOWN_TURNS), torch.nan)
    for sums, row, own in zip(found, rewards, turns, strict=True):
        for i, each in enumerate(row):
            for end, reward in each.steps if isinstance(each, StepwiseReward) else ():
                if (turn := bisect_right(own, end, key=lambda each: each.stop)) < _SHOWN_TURNS:
                    sums[i, turn] = sums[i, turn].nan_to_num(0.0) + reward
    return found


def reward_metrics(
    rewards_per_func: torch.Tensor, names: Sequence[str], rewards: torch.Tensor, is_std_zero: torch.Tensor
) -> dict[str, float]:
    """TRL's metrics. Shapes: `rewards_per_func` `(N, F)`, the others `(N,)`, of all ranks."""
    metrics = {}
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = rewards_per_func[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(rewards_per_func[:, i]).item()
    metrics["reward"] = rewards.nanmean().item()
    metrics["reward_std"] = nanstd(rewards).item()
    return {**metrics, "frac_reward_zero_std": is_std_zero.float().mean().item()}


def turn_metrics(rewards: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean rewards of the first turns over all ranks' completions that have them, `(N, F, turns)`."""
    metrics: dict[str, float] = {}
    for name, means in zip(names, rewards.nanmean(dim=0).tolist(), strict=True):
        metrics |= {f"rewards/{name}/turn_{i}": mean for i, mean in enumerate(means, start=1) if mean == mean}
    return metrics


def check_readers(names: Collection[str], prompts: Any, completions: Any) -> None:
    """
    Reward models of text can't judge media.

    Raises [`MediaError`] if prompts hold media, and warns if tools returned some.
    """
    ref = next(iter_refs(prompts), None)
    if names and ref is not None:
        raise ref.error(
            f"the reward model '{next(iter(names))}' would be given the text alone; pass its processor in "
            f"`reward_processing_classes` if it takes {ref.modality}, or use a reward function"
        )
    for name in names if next(iter_refs(completions), None) is not None else ():
        logger.warning_once(
            f"The reward model '{name}' reads text alone and doesn't get the media that tools returned; pass its "
            "processor in `reward_processing_classes` if it takes them."
        )


def warn_of_unscorable(rewards: Sequence[Sequence[float | None]], names: Collection[str], source: Source) -> None:
    """Warns of the first row with a completion that hasn't failed for which every function returned `None`."""
    given = zip(rewards, source.row_indices, source.failures, strict=True)
    row = next((row for values, row, error in given if error is None and {*values} == {None}), None)
    if row is not None:
        logger.warning(
            f"row {row}: every reward function ({', '.join(map(repr, names))}) returned None for a completion, which "
            "isn't trained on; return a number from one of them, or remove the row."
        )


# Of all ranks


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


def join_steps(
    rewards: Sequence[Sequence[float | None]],
    turns: Sequence[Sequence[tuple[int, str]]],
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    bonus: torch.Tensor | None = None,
) -> Steps:
    """
    Steps of completions, by what each function returned for them, and for each of their turns the token behind it and
    its state. What functions return for whole completions, `(N, F)`, and the bonus, `(N,)`, are the outcome.
    """
    found, numbers, weights = [], {}, weights.cpu().double()
    for row, own in zip(rewards, turns, strict=True):
        along = [dict(each.steps) if isinstance(each, StepwiseReward) else {} for each in row]
        steps = []
        for end in sorted({stop - 1 for stop, _ in own}.union(*along)):
            turn = bisect_right(own, end, key=lambda each: each[0])
            values = [weight * each[end] for weight, each in zip(weights.tolist(), along, strict=True) if end in each]
            state = numbers.setdefault(own[turn][1], len(numbers))
            steps.append(Step(end, turn, sum(values) if values else None, state))
        # Of a completion without tokens, the outcome is compared with those of others
        found.append(steps or [Step(-1, 0, None, numbers.setdefault(None, len(numbers)))])
    along = torch.tensor([[isinstance(each, StepwiseReward) for each in row] for row in rewards])
    outcomes = weighted_sum(rewards_per_func.cpu().double().masked_fill(along, torch.nan), weights)
    outcomes = outcomes if bonus is None else outcomes.nan_to_num(0.0) + bonus.cpu().double()
    return Steps(found, outcomes)


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
