# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Clear errors for reward functions that return something else than one number or `None` per completion."""

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real

from trl.trainer.utils import get_callable_name, is_async_callable


def checked_reward(reward_func: Callable) -> Callable:
    """
    Wraps a reward function so that a wrong return value is named.

    Args:
        reward_func (`Callable`):
            Reward function with TRL's signature, plain or async.

    Returns:
        `Callable`: The function with the same name and signature, which raises a `ValueError` unless it returns one
        finite number or `None` per completion.
    """
    name = get_callable_name(reward_func)

    def check(rewards, completions):
        if len(rewards) != len(completions):
            raise ValueError(
                f"The reward function '{name}' returned {len(rewards)} rewards for {len(completions)} completions; "
                "return one per completion."
            )
        for row, reward in enumerate(rewards):
            # 0-dimensional arrays and tensors count as numbers
            value = reward.item() if hasattr(reward, "item") else reward
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise ValueError(
                    f"The reward function '{name}' returned {value!r} for row {row}; return a finite number, or None "
                    "where the reward doesn't apply."
                )
        return rewards

    if is_async_callable(reward_func):

        @functools.wraps(reward_func)
        async def wrapper(*args, **kwargs):
            return check(await reward_func(*args, **kwargs), kwargs["completions"])

    else:

        @functools.wraps(reward_func)
        def wrapper(*args, **kwargs):
            return check(reward_func(*args, **kwargs), kwargs["completions"])

    wrapper.__name__ = name
    return wrapper


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
