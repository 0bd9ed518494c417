# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Class labels in the columns that reward functions read: names for those of this package and TRL, else numbers."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.logging import get_logger

from ..data.rows.labels import class_names, class_numbers


logger = get_logger(__name__)

# Packages whose reward functions compare texts
_READY = ("trl_multimodal_rft", "trl")
# Module of wrappers, which pass columns on to a function
_WRAPPERS = f"{_READY[0]}.rewards.calls"
# Arguments that aren't columns of the dataset
_NO_COLUMNS = ("prompts", "completions", "completion_ids", "group_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS += ("media_rules", "environments")


def with_labels(reward_func: Callable, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the arguments of a reward function, with the names of class labels for a function of this package or TRL.
    Another function gets the numbers that Datasets gives, and a warning if it reads such a column.
    """
    function = reward_func
    while isinstance(function, partial):  # settings
        function = function.func
    module = function.__module__ or ""
    columns = {key: value for key, value in arguments.items() if key not in _NO_COLUMNS}
    names = {key: class_names(value) for key, value in columns.items()}
    labels = [key for key in columns if names[key] is not columns[key]]
    if not labels or module == _WRAPPERS:
        return arguments
    if module.partition(".")[0] in _READY:
        return {**arguments, **names}
    for key in filter(lambda key: _reads(function, key), labels):
        logger.warning_once(
            f"The reward function '{name}' gets the column {key!r} as the numbers of a `ClassLabel`. For names, call "
            f"`dataset.features[{key!r}].int2str(number)`, or add a column of names to the dataset."
        )
    return {**arguments, **{key: class_numbers(columns[key]) for key in labels}}


def _reads(function: Callable, column: str) -> bool:
    """Returns whether a function has a column as a parameter, or names it in its code, as in `kwargs["label"]`."""
    function = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or column in code.co_varnames or column in code.co_consts
