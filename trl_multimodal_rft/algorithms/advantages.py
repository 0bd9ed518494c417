# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages of a whole batch, by the name of an estimator or by a user's function."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .estimators import (
    ALIASES,
    ESTIMATORS,
    Estimator,
    GroupStatistics,
    as_estimator,
    describe_estimators,
    estimator,
    group_statistics,
)
from .group_advantages import (
    clip_filter_like_weights,
    cpgd,
    dr_grpo,
    group_norm,
    online_dpo,
    reinforce,
    reinforce_baseline,
    rloo,
)
from .kl import approx_kl
from .returns import Steps
from .step_advantages import gae, gigpo, ps_grpo, turn_norm
from .weighted_advantages import max_rl, opo, optimal_token_baseline, pass_at_k, pkpo


__all__ = [
    "ALIASES",
    "ESTIMATORS",
    "Estimator",
    "GroupStatistics",
    "as_estimator",
    "check_estimator",
    "clip_filter_like_weights",
    "cpgd",
    "describe_estimators",
    "dr_grpo",
    "estimate_advantages",
    "estimator",
    "gae",
    "gigpo",
    "group_norm",
    "group_statistics",
    "max_rl",
    "online_dpo",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "pkpo",
    "ps_grpo",
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "turn_norm",
]


def estimate_advantages(
    name: str | Estimator | Callable,
    *,
    rewards: torch.Tensor,
    rewards_per_func: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    scale: str = "group",
    steps: Steps | None = None,
) -> torch.Tensor:
    r"""
    Computes the advantages of a whole batch, by the name of an estimator or by a user's function.

    Args:
        name (`str`, [`Estimator`] or `Callable`):
            Name of an estimator, which settings may follow (`"cpgd(weight='std')"`), the estimator itself, or a
            function that takes the next six arguments by name and returns advantages of shape `(N,)` or `(N, T)`.
        rewards (`torch.Tensor`):
            Weighted and shaped rewards, `NaN` where unscorable, shape `(N,)`.
        rewards_per_func (`torch.Tensor`):
            Rewards by each reward function, shape `(N, F)`.
        group_ids (`torch.Tensor`):
            Group of each completion, any integers in any order, shape `(N,)`.
        mask (`torch.Tensor`):
            1 on the tokens that are trained on, shape `(N, T)`.
        old_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the policy that sampled, shape `(N, T)`.
        ref_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the reference, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the k1 penalty in the reward. Estimators per token subtract it from the rewards of tokens,
            others from the reward of the completion. In [`online_dpo`], the coefficient is $\beta$ instead.
        scale (`str`, *optional*, defaults to `"group"`):
            [`group_norm`] divides by the standard deviation of the `"group"`, of all rewards of the `"batch"`, or by
            nothing (`"none"`).
        steps ([`~algorithms.returns.Steps`], *optional*):
            Steps of the completions with their rewards, which some estimators need.

    Returns:
        `torch.Tensor`: Advantages, shape `(N,)` or `(N, T)`, 0 for unscorable completions and outside the mask.

    Raises:
        `ValueError`: If the function returns another shape or a value that isn't finite, or the name is unknown.
    """
    tensors: dict[str, Any] = {
        "rewards": rewards,
        "rewards_per_func": rewards_per_func,
        "group_ids": group_ids,
        "mask": mask,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
    }
    if callable(name):
        return _check_advantages(name(**tensors), name, rewards, mask)
    try:
        chosen = name if isinstance(name, Estimator) else as_estimator(name)
    except KeyError:
        chosen = None
    if chosen is None:
        raise ValueError(f"There is no advantage estimator {name!r}; name one of {', '.join(ESTIMATORS)}.")
    if chosen.needs == "critic" or (chosen.step_input and steps is None):
        missing = "values of a critic; call `gae`" if chosen.needs == "critic" else "rewards of steps; pass `steps`"
        raise ValueError(f"`advantage_estimator={chosen.spelling!r}` needs {missing}.")
    parameters = inspect.signature(chosen.function).parameters
    # Estimators with the argument `kl_coef` use it themselves
    if kl_coef and not chosen.per_token and "kl_coef" not in parameters:
        kl = approx_kl(tensors["old_logps"], tensors["ref_logps"], mask, "k1")
        tensors["rewards"] = rewards - kl_coef * kl.sum(1)
    arguments = {**tensors, "kl_coef": kl_coef, "scale": scale, "steps": steps}
    return chosen.function(**{key: value for key, value in arguments.items() if key in parameters}, **chosen.settings)


def is_constant(estimator: Estimator, n_completions: int) -> bool:
    """Returns whether an estimator of groups gives 0 to all completions of a prompt, whatever their rewards."""
    reads_logps = estimator.reads_logps or "old_logps" in inspect.signature(estimator.function).parameters
    if estimator.needs != "group" or estimator.step_input is not None or reads_logps:
        return False
    rewards = torch.linspace(0.0, 1.0, n_completions, dtype=torch.float64).square()
    advantages = estimate_advantages(
        estimator,
        rewards=rewards,
        rewards_per_func=rewards[:, None],
        group_ids=torch.zeros(n_completions, dtype=torch.long),
        mask=torch.ones(n_completions, 1, dtype=torch.long),
    )
    return bool((advantages.abs() < 1e-6).all())


def check_estimator(function: Callable) -> None:
    """Raises a `ValueError` if a user's function doesn't accept the arguments that [`estimate_advantages`] passes."""
    names = ("rewards", "rewards_per_func", "group_ids", "mask", "old_logps", "ref_logps")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"The advantage estimator '{_function_name(function)}' {signature} can't be called with "
            f"{', '.join(names)} as keyword arguments ({error}); name its parameters like "
            "these arguments, and add `**kwargs` for arguments that it doesn't need."
        ) from None


def _function_name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_advantages(
    advantages: torch.Tensor, function: Callable, rewards: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Returns a user's advantages, set to 0 for unscorable completions and outside the mask. Raises a `ValueError` for
    another shape, or a value that isn't finite.
    """
    name = _function_name(function)
    if not isinstance(advantages, torch.Tensor) or advantages.shape not in (rewards.shape, mask.shape):
        result = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
        raise ValueError(
            f"The advantage estimator '{name}' returned {result}; return a tensor of shape {tuple(rewards.shape)} or "
            f"{tuple(mask.shape)}."
        )
    scorable = ~rewards.isnan()
    is_valid = scorable if advantages.dim() == 1 else scorable[:, None] & mask.bool()
    advantages = torch.where(is_valid, advantages, 0)
    if not advantages.isfinite().all():
        index = int((~advantages.isfinite()).nonzero()[0, 0])
        raise ValueError(f"The advantage estimator '{name}' returned a value that isn't finite for sample {index}.")
    return advantages.to(rewards.dtype)
