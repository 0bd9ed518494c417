# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loads reward functions by name."""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from trl import rewards as trl_rewards
from trl.trainer.utils import get_callable_name

from .answers import accuracy_reward, format_reward
from .checks import check_signature
from .choices import choice_reward


# Names of this package take precedence over TRL's. The last one has the values of TRL's command.
_MADE_BY: dict[str, Callable[[], Callable]] = {
    "accuracy_reward": lambda: accuracy_reward,
    "choice_reward": lambda: choice_reward,
    "format_reward": lambda: format_reward,
    "reasoning_accuracy_reward": lambda: trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": lambda: trl_rewards.think_format_reward,
    "get_soft_overlong_punishment": partial(trl_rewards.get_soft_overlong_punishment, 1280, 256),
}
REWARD_NAMES = tuple(_MADE_BY)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def load_reward_funcs(names: Sequence[str]) -> list[Callable]:
    """Loads reward functions by name."""
    reward_funcs = [_load(name) for name in names]
    for reward_func in reward_funcs:
        check_signature(reward_func, get_callable_name(reward_func))
    return reward_funcs


def as_reward_funcs(given: Any) -> list[Any]:
    """The reward functions and models in a trainer's `reward_funcs`, as a list."""
    reward_funcs = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(each, str):
            each = each if _names_a_model(each) else _load(each)
        if callable(each) and not isinstance(each, nn.Module):
            check_signature(each, get_callable_name(each))
        reward_funcs.append(each)
    return reward_funcs


def _names_a_model(name: str) -> bool:
    if os.path.isdir(name):
        return True
    is_function = name in _MADE_BY or _DOTTED.fullmatch(name) or difflib.get_close_matches(name, _MADE_BY, cutoff=0.8)
    return not is_function


def _load(name: str) -> Callable:
    if name in _MADE_BY:
        return _MADE_BY[name]()
    module, _, function = name.rpartition(".")
    if not module:
        close = difflib.get_close_matches(name, _MADE_BY, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"There is no reward function {name!r}; {meant}Name one of {[*_MADE_BY]}, or a dotted path such as "
            "'my_rewards.brief'."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"There is no reward function {name!r}: {error}.") from error
