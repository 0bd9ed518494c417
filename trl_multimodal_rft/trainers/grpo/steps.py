# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Steps: parts of completions with a reward of their own, for the estimators that read them."""

from itertools import chain

import torch
from accelerate.utils import gather_object

from ...algorithms.advantages import Estimator
from ...algorithms.returns import Steps
from ...rewards.calls import StepwiseReward
from ...rollout.estimates import join_steps
from ...rollout.rollout import Rewards, Rollout


def gather_steps(
    rollout: Rollout,
    rewards: Rewards,
    estimator: Estimator,
    weights: torch.Tensor,
    *,
    has_tools: bool,
    is_first_batch: bool,
) -> Steps | None:
    """
    Returns the steps of all ranks' completions, or `None` if the estimator doesn't read them. `weights` are those of
    the reward functions, `(F,)`. Raises `ValueError` if the first batch of the run has no steps.
    """
    if estimator.step_input is None:
        return None
    reads_states = estimator.step_input == "states"
    # By completion and turn: the index where the turn ends, and for GiGPO the digest of its state
    turns = [
        [(turn.stop, turn.state if reads_states else "") for turn in completion]
        for completion in rollout.source.sampled_turns
    ]
    by_completion = gather_object(rewards.by_completion)
    turns = gather_object(turns)
    has_steps = any(isinstance(reward, StepwiseReward) for reward in chain.from_iterable(by_completion))
    # GiGPO also discounts a completion's reward to each of its turns, so with tools it needs no rewards of turns
    has_steps = has_steps or (reads_states and has_tools)
    if is_first_batch and not has_steps:
        raise ValueError(
            f"`advantage_estimator={estimator.spelling!r}` reads rewards of steps, and the first batch has none; let "
            "a reward function return a number per turn, or use 'group_norm'."
        )
    return join_steps(by_completion, turns, rewards.per_func, weights, rewards.bonus)
