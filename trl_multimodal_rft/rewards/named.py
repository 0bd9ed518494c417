# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward functions that are loaded by name, with settings."""

import difflib
import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from torch import nn
from trl import rewards as trl_rewards
from trl.trainer.utils import get_callable_name

from .. import rewards
from ..data.rows.counts import describe_empty_cells, empty_row_indices
from ..data.rows.features import Rows
from ..spelling import check_settings, is_dotted, load_dotted, split_settings
from .calls import CALLED_WITH, check_signature


def get_soft_overlong_punishment(max_completion_len: int = 1280, soft_punish_cache: int = 256) -> Callable:
    """Returns TRL's penalty of overlong completions, by default with the values of TRL's command line."""
    return trl_rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)


# Names of this package take precedence over TRL's
_FUNCTIONS = tuple(name for name in rewards.__all__ if name.endswith("_reward"))
_TRL_FUNCTIONS = ("reasoning_accuracy_reward", "think_format_reward")
# Factories, which are called to make a reward function, with or without settings
_FACTORIES = ("get_soft_overlong_punishment", "JudgeReward", "RemoteReward")
REWARD_NAMES = (*_FUNCTIONS, *_TRL_FUNCTIONS, *_FACTORIES)
# Arguments of reward functions that trainers pass: of the call, and columns that functions of this package read
_NO_SETTINGS = (*CALLED_WITH, "group_ids", "media_rules", "completion_audio", "solution", "choices")
DEFAULT_REWARDS = ("accuracy_reward", "format_reward")  # of commands without a reward model


def load_reward_funcs(names: Sequence[str]) -> list[Callable]:
    """Returns the reward functions of names such as `"format_reward"` or `"length_reward(bonus=0.1)"`."""
    reward_funcs = [_load_func(name) for name in names]
    for reward_func in reward_funcs:
        check_signature(reward_func, get_callable_name(reward_func))
    return reward_funcs


def as_reward_funcs(functions: str | Callable | Sequence[str | Callable]) -> list[Any]:
    """Returns the reward functions and models of a trainer's `reward_funcs` as a list, and loads named functions."""
    reward_funcs = []
    listed = functions if isinstance(functions, (list, tuple)) else [functions]
    for reward_func in listed:
        if isinstance(reward_func, str):
            is_function = reward_func.endswith(")") or is_dotted(reward_func)
            # A misspelled name of a function must not be taken for a model on the Hub
            is_function = is_function or difflib.get_close_matches(reward_func, REWARD_NAMES, cutoff=0.8)
            reward_func = _load_func(reward_func) if is_function and not os.path.isdir(reward_func) else reward_func
        if callable(reward_func) and not isinstance(reward_func, nn.Module):
            check_signature(reward_func, get_callable_name(reward_func))
        reward_funcs.append(reward_func)
    return reward_funcs


def check_reward_columns(functions: Sequence[Any], dataset: Rows | None, hears: bool = True) -> list[str]:
    """
    Checks that a dataset has the columns that reward functions read, and returns warnings about their empty cells.
    `hears` is whether a `speech_decoder` gives them the sounds of completions.

    Raises `ValueError` for a missing column, and for an empty column that a function of this package needs.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return []
    columns = {*dataset.column_names} - {"prompt", "completion"}
    warnings = []
    # The arguments of a call without completions
    sounds = ("completion_audio",) if hears else ()
    names = ("prompts", "completions", "completion_ids", "group_ids", *sounds, *columns)
    no_rows: dict[str, list] = dict.fromkeys(names, [])
    for func in functions:
        function = getattr(func, "func", func)  # without settings, which make a `partial`
        if inspect.isfunction(function):
            check_signature(
                func, get_callable_name(func), [*CALLED_WITH, "group_ids", "media_rules", *sounds, *columns]
            )
        name = getattr(function, "__name__", None)
        if name in _FUNCTIONS and function is getattr(rewards, name):
            func(**no_rows)  # raises an error about a missing column
            needed_columns = columns.intersection(inspect.signature(function).parameters)
            cells = describe_empty_cells(dataset, needed_columns)
            if cells:
                if any(len(empty_row_indices(dataset, column)) == len(dataset) for column in needed_columns):
                    raise ValueError(f"'{name}' has nothing to read: {cells}; fill them in, or remove the reward.")
                warnings.append(f"'{name}' gives no reward where {cells}.")
    return warnings


def _load_func(name: str) -> Callable:
    name, settings = split_settings(name)
    if name in _FACTORIES:
        return _call_factory(getattr(rewards, name, get_soft_overlong_punishment), name, settings or {})
    function = getattr(rewards, name) if name in _FUNCTIONS else None
    if function is None:
        path = f"trl.rewards.{name}" if name in _TRL_FUNCTIONS else name
        function = load_dotted(path, "reward function", REWARD_NAMES, "my_rewards.brief")
    if settings is None:
        return function
    if inspect.isclass(function):
        return _call_factory(function, name, settings)
    for key in settings:
        if key in _NO_SETTINGS:
            raise ValueError(f"`{key}` of {name!r} is no setting, as the trainer passes it for each batch; remove it.")
    check_settings(function, name, settings)
    # Lists become tuples, since a reward function would read a list as a column with an entry per row
    constants = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    reward_func = partial(function, **constants)
    vars(reward_func)["required_in_prompt"] = getattr(function, "required_in_prompt", None)
    return reward_func


def _call_factory(factory: Callable, name: str, settings: dict[str, Any]) -> Callable:
    check_settings(factory, name, settings)
    parameters = inspect.signature(factory).parameters.values()
    missing = [param.name for param in parameters if param.default is param.empty and param.name not in settings]
    if missing:
        example = ", ".join(f"{param}=..." for param in missing)
        raise ValueError(f"{name!r} needs settings: `{name}({example})`.")
    return factory(**settings)
