# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Clear errors for reward functions that don't take what they are called with, fail, or return no rewards."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, cast

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from ..data.columns import as_text, strip_media
from ..data.rules import MediaRules


_LARGEST = torch.finfo(torch.float32).max  # in which rewards are summed up
# Arguments of every reward function, by name, in addition to the columns of the dataset
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class RowError(ValueError):
    """
    An error of a row, of which a reward function knows the place in the batch, and its caller the number in the
    dataset. `problem` is what is wrong with it, and the remedy.
    """

    def __init__(self, place: int, problem: str):
        super().__init__(place, problem)
        self.place, self.problem = place, problem

    def __str__(self) -> str:
        return f"row {self.place}, {self.problem}"


def check_signature(reward_func: Callable, name: str, given: Collection[str] | None = None) -> None:
    """Checks whether a reward function takes what it is called with."""
    try:
        parameters = inspect.signature(reward_func).parameters
    except (TypeError, ValueError):  # of some builtins
        return
    kinds = {each.kind for each in parameters.values()}
    by_name = {key for key, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    names = _ALWAYS_GIVEN if given is None else given
    called = f"it is called with {', '.join(names)}" + (" and the columns of the dataset" if given is None else "")
    if inspect.Parameter.VAR_KEYWORD not in kinds and not by_name.issuperset(names):
        raise ValueError(
            f"The reward function '{name}' takes ({', '.join(map(str, parameters))}), but {called}, all by name; add "
            "`**kwargs` to its parameters."
        )
    missing = [key for key in by_name.difference(names) if parameters[key].default is inspect.Parameter.empty]
    if given is not None and missing:
        raise ValueError(
            f"The reward function '{name}' needs {', '.join(map(repr, sorted(missing)))}, but {called}; name the "
            "parameter after a column, or give it a default."
        )


@contextmanager
def _explained(columns: dict[str, Any], rows: Sequence[int] | None) -> Iterator[None]:
    """Names the row of the dataset in an error of a reward function, and the form of completions."""
    try:
        yield
    except RowError as error:
        if rows is None:
            raise
        raise RowError(rows[error.place], error.problem) from None
    except (AttributeError, TypeError) as error:
        conversational = not all(isinstance(completion, str) for completion in columns["completions"])
        if conversational and re.search(r"\b(list|dict)\b", str(error)):
            error.add_note(
                "Completions are lists of messages here, as the prompts are: the text of one is "
                "`completion[-1]['content']`."
            )
        elif not conversational and re.search(r"string ind|\bstr\b", str(error)):
            error.add_note(
                "Completions are texts here, as the prompts are; a function that reads messages takes prompts of "
                "messages: `[{'role': 'user', 'content': ...}]`."
            )
        raise


def missing_instructions(reward_funcs: Sequence[Any], names: Sequence[str], prompts: Sequence[Any]) -> list[str]:
    """
    Warnings of reward functions that reward what no prompt asks for. A function says what that is with its attribute
    `required_in_prompt`, as [`format_reward`] does.
    """
    required = {
        name: getattr(func, "required_in_prompt", None) for name, func in zip(names, reward_funcs, strict=True)
    }
    texts = [as_text(strip_media(prompt)) for prompt in prompts] if any(required.values()) else []
    return [
        f"No prompt of the first batch mentions `{text}`, which '{name}' rewards, so that completions rarely have it: "
        f'ask for it in the prompts or in a system message (`--system_prompt "Output the final answer in <answer> '
        f"</answer>.\"`), or leave out '{name}'."
        for name, text in required.items()
        if text is not None and not any(text in prompt for prompt in texts)
    ]


def checked_reward(
    reward_func: Callable,
    name: str | None = None,
    media_rules: MediaRules | None = None,
    rows: Sequence[int] | None = None,
) -> Callable:
    """
    Wraps a reward function so that wrong parameters and a wrong return value raise a `ValueError` that names them.
    """
    name = name or get_callable_name(reward_func)
    further = {} if media_rules is None else rules_for(reward_func, media_rules)

    if is_async_callable(reward_func):

        @functools.wraps(reward_func)
        async def wrapper(*args, **kwargs):
            check_signature(reward_func, name, {**kwargs, **further})
            with _explained(kwargs, rows):
                found = await reward_func(*args, **kwargs, **further)
            return check_rewards(found, len(kwargs["completions"]), name, rows)

    else:

        @functools.wraps(reward_func)
        def wrapper(*args, **kwargs):
            check_signature(reward_func, name, {**kwargs, **further})
            with _explained(kwargs, rows):
                found = reward_func(*args, **kwargs, **further)
            return check_rewards(found, len(kwargs["completions"]), name, rows)

    wrapper.__name__ = name
    return wrapper


def rules_for(reward_func: Callable, media_rules: MediaRules) -> dict[str, MediaRules]:
    """Rules for media as an argument of a reward function. Others get what TRL's trainers give, and nothing else."""
    asked = "media_rules" in inspect.signature(reward_func).parameters
    return {"media_rules": media_rules} if asked else {}


def check_rewards(
    rewards: Any, n_completions: int, name: str, rows: Sequence[int] | None = None
) -> list[float | None]:
    """Checks what a reward function returned."""
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
    """Whether a value is a number that float32 holds, as rewards are."""
    return isinstance(value, Real) and abs(cast(float, value)) <= _LARGEST


def reward_tensor(rewards: Any, n_completions: int, name: str) -> torch.Tensor:
    """What a reward function returned, as float32 on the CPU, shape `(n_completions,)`."""
    if isinstance(rewards, torch.Tensor):
        if rewards.shape != (n_completions,):
            raise ValueError(
                f"'{name}' returned rewards of shape {tuple(rewards.shape)} for {n_completions} completions."
            )
        rewards = [None if math.isnan(value) else value for value in rewards.tolist()]
    values = check_rewards(rewards, n_completions, name)
    return torch.tensor([math.nan if value is None else float(value) for value in values])


def distinct_names(names: Sequence[str]) -> list[str]:
    """Names under which metrics are logged: those that repeat, as of two lambdas, get `_2`, `_3` and so on."""
    distinct: list[str] = []
    for name in names:
        own, number = name, 1
        while own in distinct or number > 1 and own in names:
            number += 1
            own = f"{name}_{number}"
        distinct.append(own)
    return distinct
