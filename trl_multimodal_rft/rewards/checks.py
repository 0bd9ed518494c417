# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Clear errors for reward functions that return something else than one number or `None` per completion."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from ..data.rules import MediaRules


_LARGEST = torch.finfo(torch.float32).max  # in which rewards are summed up


def checked_reward(
    reward_func: Callable,
    name: str | None = None,
    media_rules: MediaRules | None = None,
    rows: Sequence[int] | None = None,
) -> Callable:
    """
    Wraps a reward function so that a wrong return value is named.

    Args:
        reward_func (`Callable`):
            Reward function with TRL's signature, plain or async.
        name (`str`, *optional*):
            What errors call it. Defaults to its own name.
        media_rules ([`~data.rules.MediaRules`], *optional*):
            What it gets as `media_rules` if it has a parameter of this name.
        rows (`Sequence[int]`, *optional*):
            Number of each completion's row in its dataset, for errors.

    Returns:
        `Callable`: The function with the same name and signature, which raises a `ValueError` unless it returns one
        finite number or `None` per completion.
    """
    name = name or get_callable_name(reward_func)
    further = {} if media_rules is None else rules_for(reward_func, media_rules)

    if is_async_callable(reward_func):

        @functools.wraps(reward_func)
        async def wrapper(*args, **kwargs):
            found = await reward_func(*args, **kwargs, **further)
            return check_rewards(found, len(kwargs["completions"]), name, rows)

    else:

        @functools.wraps(reward_func)
        def wrapper(*args, **kwargs):
            found = reward_func(*args, **kwargs, **further)
            return check_rewards(found, len(kwargs["completions"]), name, rows)

    wrapper.__name__ = name
    return wrapper


def rules_for(reward_func: Callable, media_rules: MediaRules) -> dict[str, MediaRules]:
    """
    Rules for media as an argument of a reward function. Others get what TRL's trainers give, and nothing else.

    Args:
        reward_func (`Callable`):
            Reward function.
        media_rules ([`~data.rules.MediaRules`]):
            The rules.

    Returns:
        `dict`: The argument, if the function has a parameter `media_rules`.
    """
    asked = "media_rules" in inspect.signature(reward_func).parameters
    return {"media_rules": media_rules} if asked else {}


def check_rewards(
    rewards: Any, n_completions: int, name: str, rows: Sequence[int] | None = None
) -> list[float | None]:
    """
    Checks what a reward function returned.

    Args:
        rewards (`Any`):
            What it returned.
        n_completions (`int`):
            Number of completions that it got.
        name (`str`):
            What errors call it.
        rows (`Sequence[int]`, *optional*):
            Number of each completion's row in its dataset, for errors.

    Returns:
        `list[float | None]`: The rewards.

    Raises:
        `ValueError`: If that isn't one number that is finite in float32, or `None`, for each completion.
    """
    source = f"The reward function '{name}' returned"
    try:
        if isinstance(rewards, (dict, str)):
            raise TypeError
        values = list(rewards)
    except TypeError:  # also of arrays and tensors without a dimension
        raise ValueError(
            f"{source} {rewards!r} for {n_completions} completions; return a list with one number for each, or None "
            "where the reward doesn't apply."
        ) from None
    if len(values) != n_completions:
        raise ValueError(f"{source} {len(values)} rewards for {n_completions} completions; return one per completion.")
    for place, reward in enumerate(values):
        try:
            value = reward.item()  # arrays and tensors of one element count as numbers
        except (AttributeError, RuntimeError, ValueError):
            value = reward
        if value is not None and not is_finite(value):
            where = f"completion {place}" if rows is None else f"row {rows[place]}"
            raise ValueError(
                f"{source} {value!r:.40} for {where}; return a finite number, or None where the reward doesn't apply. "
                "Rewards are float32, up to 3.4e38."
            )
        values[place] = value
    return values


def is_finite(value: Any) -> bool:
    """
    Whether a value is a number that float32 holds, as rewards are.

    Args:
        value (`Any`):
            Any value.

    Returns:
        `bool`: `False` for 1e39, too.
    """
    return isinstance(value, Real) and abs(cast(float, value)) <= _LARGEST


def reward_tensor(rewards: Any, n_completions: int, name: str) -> torch.Tensor:
    """
    What a reward function returned, as a tensor.

    Args:
        rewards (`Any`):
            What [`check_rewards`] takes, or a tensor with `NaN` where the reward doesn't apply.
        n_completions (`int`):
            Number of completions that the function got.
        name (`str`):
            What errors call it.

    Returns:
        `torch.Tensor`: Rewards on the CPU, float32, shape `(n_completions,)`.

    Raises:
        `ValueError`: If that isn't one finite reward for each completion.
    """
    if isinstance(rewards, torch.Tensor):
        if rewards.shape != (n_completions,):
            raise ValueError(
                f"'{name}' returned rewards of shape {tuple(rewards.shape)} for {n_completions} completions."
            )
        rewards = [None if math.isnan(value) else value for value in rewards.tolist()]
    values = check_rewards(rewards, n_completions, name)
    return torch.tensor([math.nan if value is None else float(value) for value in values])


def distinct_names(names: Sequence[str]) -> list[str]:
    """
    Names under which metrics are kept apart, as of two lambdas.

    Args:
        names (`Sequence[str]`):
            Names of reward functions.

    Returns:
        `list[str]`: The same, with `_2`, `_3` and so on after those that came before.
    """
    distinct: list[str] = []
    for name in names:
        own, number = name, 1
        while own in distinct or number > 1 and own in names:
            number += 1
            own = f"{name}_{number}"
        distinct.append(own)
    return distinct
