# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards along completions: what functions give for turns or other steps, and what is computed of all ranks'."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..algorithms.steps import Steps
from ..rewards.checks import StepwiseReward
from .reward import weighted_sum
from .rollout import Rollout, Turn


# First turns of completions whose mean rewards are logged
SHOWN_TURNS = 8


class Step(NamedTuple):
    """A step of a completion, as ranks exchange it."""

    end: int  # index of its last token
    turn: int
    rewards: tuple[float, ...]  # by function, NaN where one doesn't reward it
    state: str | None  # of its turn, where an estimator reads it


def _turn_of(end: int, turns: Sequence[Turn]) -> int:
    return sum(turn.stop <= end for turn in turns)


def rewards_by_turn(rewards: Sequence[Sequence[float | None]], turns: Sequence[Sequence[Turn]]) -> torch.Tensor:
    """Sums of the rewards in each of the first turns, `(N, F, SHOWN_TURNS)`; NaN where a function doesn't give any."""
    found = torch.full((len(rewards), len(rewards[0]), SHOWN_TURNS), torch.nan)
    for i, (row, own) in enumerate(zip(rewards, turns, strict=True)):
        for j, reward in enumerate(row):
            for end, value in reward.steps if isinstance(reward, StepwiseReward) else ():
                number = _turn_of(end, own)
                if number < SHOWN_TURNS:
                    found[i, j, number] = found[i, j, number].nan_to_num(0.0) + value
    return found


def turn_metrics(rewards: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean rewards of the first turns over all ranks' completions that have them. `rewards` is `(N, F, turns)`."""
    means = rewards.nanmean(dim=0).tolist()
    return {
        f"rewards/{name}/turn_{number}": mean
        for name, own in zip(names, means, strict=True)
        for number, mean in enumerate(own, start=1)
        if mean == mean
    }


def steps_of(rollout: Rollout, reads_states: bool) -> list[list[Step]]:
    """The steps of this rank's completions: each ends with a turn, or where a reward function said."""
    found = []
    for row, turns in zip(rollout.rewards.given, rollout.source.sampled_turns, strict=True):
        states = [turn.state if reads_states else None for turn in turns]
        rewards = [dict(each.steps) if isinstance(each, StepwiseReward) else {} for each in row]
        ends = sorted({turn.stop - 1 for turn in turns}.union(*rewards))
        numbers = [_turn_of(end, turns) for end in ends]
        found.append(
            [
                Step(end, number, tuple(each.get(end, torch.nan) for each in rewards), states[number])
                for end, number in zip(ends, numbers, strict=True)
            ]
        )
    return found


def join_steps(
    steps: Sequence[Sequence[Step]],
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    bonus: torch.Tensor | None = None,
) -> Steps:
    """
    The steps of all ranks' completions, with weighted rewards, from what functions returned, `(N, F)`, and a bonus,
    `(N,)`, which is a part of the outcome.
    """
    flat, weights = [step for own in steps for step in own], weights.cpu().double()
    completions = torch.tensor([i for i, own in enumerate(steps) for _ in own])
    rewards = torch.tensor([step.rewards for step in flat], dtype=torch.float64)
    along = torch.zeros(rewards_per_func.shape, dtype=torch.float64)
    along.index_add_(0, completions, (~rewards.isnan()).double())
    outcomes = weighted_sum(rewards_per_func.cpu().double().masked_fill(along > 0, torch.nan), weights)
    if bonus is not None:
        outcomes = outcomes.nan_to_num(0.0) + bonus.cpu().double()
    numbers: dict[str | None, int] = {}
    states = [numbers.setdefault(step.state, len(numbers)) for step in flat]
    ends, turns = [step.end for step in flat], [step.turn for step in flat]
    places = (torch.tensor(each) for each in (ends, turns))
    return Steps(completions, *places, weighted_sum(rewards, weights), outcomes, torch.tensor(states))
