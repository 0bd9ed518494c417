# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Calls of reward functions, sync and async, with checks of their parameters, errors and return values."""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TrainerState
from trl.trainer.utils import (
    get_callable_name,
    is_async_callable,
    shutdown_event_loop_in_daemon,
    start_event_loop_in_daemon,
)

from ..data.reading.rules import MediaRules
from ..data.rows.columns import as_text, strip_media
from ..data.rows.names import ANSWER_NAMES
from ..encoding.processors import control_tokens
from ..spelling import did_you_mean
from .class_labels import with_labels
from .failures import RewardError, line_of, user_frames


T = TypeVar("T")

LARGEST_REWARD = torch.finfo(torch.float32).max  # rewards are summed in float32
# A completion: a text, or messages that end with the answer
Completion = str | list[dict[str, Any]]
# A reference answer in a column of the dataset
Reference = str | float | Decimal | list | tuple | dict | np.ndarray | torch.Tensor | None
# An argument of a reward function: a column of the dataset, or a value that trainers add
Argument = Sequence | TrainerState | MediaRules | Callable[..., None] | None
# The return value of a reward function, before [`check_rewards`]
Returned = Iterable[float | Sequence | torch.Tensor | None] | float | None
# Arguments of a reward function (`None` skips the call), a context for errors, and a function that converts rewards
PreparedCall = tuple[dict[str, Any] | None, AbstractContextManager, Callable[[Any], list[float | None]]]
# Keyword arguments of every reward function, in addition to the columns of the dataset
CALLED_WITH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Columns of the dataset that reward functions don't get, as in TRL: the arguments `prompts`, `completions` and
# `completion_ids` come from the trainer
_NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")


class StepwiseReward(float):
    """The sum of the rewards of a completion's steps. `steps` are pairs (index of a step's last token, reward)."""

    steps: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, steps: Sequence[tuple[int, float]]) -> "StepwiseReward":
        total = cls(sum(reward for _, reward in steps))
        total.steps = tuple(steps)
        return total


class RowError(ValueError):
    """
    An error of a row, raised with the row's position in the batch. Callers replace the position by the row index.
    `problem` contains the remedy.
    """

    def __init__(self, position: int, problem: str):
        super().__init__(position, problem)
        self.position = position
        self.problem = problem

    def __str__(self) -> str:
        return f"row {self.position}, {self.problem}"


def require_column(values: Sequence[T] | None, column: str, name: str, columns: Collection[str]) -> Sequence[T]:
    """Returns `values`, the column that the function `name` compares with. Raises `ValueError` if it is missing."""
    if values is None:
        likely = next((other for other in ANSWER_NAMES if column == "solution" and other in columns), None)
        renamed = "the column that holds these values" if likely is None else f"{likely!r} to {column!r}"
        raise ValueError(
            f"{name} compares with the dataset column `{column}`, which is missing: add the column, or rename "
            f"{renamed}. Columns of the dataset: "
            f"{sorted({*columns} - {*CALLED_WITH, 'group_ids'})}.{did_you_mean(column, columns)}"
        )
    return values


def check_signature(reward_func: Callable, name: str, arguments: Collection[str] | None = None) -> None:
    """Raises `ValueError` if a function can't be called with these arguments, by default with `CALLED_WITH`."""
    try:
        parameters = inspect.signature(reward_func).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return
    kinds = {param.kind for param in parameters.values()}
    keyword_names = {
        key for key, param in parameters.items() if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)
    }
    names = CALLED_WITH if arguments is None else arguments
    called = f"it is called with {', '.join(names)}" + (" and the columns of the dataset" if arguments is None else "")
    if inspect.Parameter.VAR_KEYWORD not in kinds and not keyword_names.issuperset(names):
        raise ValueError(
            f"The reward function '{name}' takes ({', '.join(map(str, parameters))}), but {called}, all by name; add "
            "`**kwargs` to its parameters."
        )
    missing = [key for key in keyword_names.difference(names) if parameters[key].default is inspect.Parameter.empty]
    if arguments is not None and missing:
        remedy = "name the parameter after a column, or give it a default"
        if "completion_audio" in missing:
            remedy = "set `speech_decoder`, with which it hears completions"
        raise ValueError(
            f"The reward function '{name}' needs {', '.join(map(repr, sorted(missing)))}, but {called}; {remedy}."
        )


@contextmanager
def _explain_errors(completions: Sequence[Completion], rows: Sequence[int] | None, name: str) -> Iterator[None]:
    """
    Adds the name of the reward function, the rows of the batch and a hint about the format of completions to errors.
    Raises a [`~rewards.failures.RewardError`] if the traceback has code of the user.
    """
    indices = range(len(completions)) if rows is None else rows
    try:
        yield
    except RowError as error:
        raise RowError(indices[error.position], error.problem) from None
    except Exception as error:
        distinct_rows = sorted(set(indices))
        location = f"row {distinct_rows[0]}" if len(distinct_rows) == 1 else f"one of the rows {distinct_rows}"
        hint = _hint_about_format(error, completions)
        frames = user_frames(error)
        if not frames:
            for note in [f"The reward function '{name}' raised this for {location}.", *hint]:
                error.add_note(note)
            raise
        raised = f"raised {type(error).__name__} for {location}, at {line_of(frames[-1])}: {error}"
        text = " ".join([f"The reward function '{name}' {raised}", *getattr(error, "__notes__", ()), *hint])
        raise RewardError(text) from error


def _hint_about_format(error: Exception, completions: Sequence[Completion]) -> list[str]:
    is_conversational = not all(isinstance(completion, str) for completion in completions)
    if not isinstance(error, (AttributeError, TypeError)):
        return []
    if is_conversational and re.search(r"\b(list|dict)\b", str(error)):
        return [
            "Completions are lists of messages here, as the prompts are; the text of one is "
            "`completion[-1]['content']`."
        ]
    if not is_conversational and re.search(r"string ind|\bstr\b", str(error)):
        return [
            "Completions are texts here, as the prompts are; a function that reads messages needs prompts of "
            "messages: `[{'role': 'user', 'content': ...}]`."
        ]
    return []


def missing_instructions(reward_funcs: Sequence[Any], names: Sequence[str], prompts: Sequence[Any]) -> list[str]:
    """Returns a warning per reward function whose `required_in_prompt` is in no prompt, see [`format_reward`]."""
    required = {
        name: getattr(func, "required_in_prompt", None) for name, func in zip(names, reward_funcs, strict=True)
    }
    texts = [as_text(strip_media(prompt)) for prompt in prompts] if any(required.values()) else []
    return [
        f"No prompt of the first batch mentions `{text}`, which '{name}' rewards, so completions rarely contain it: "
        f'request it in the prompts or in a system message (`--system_prompt "Output the final answer in <answer> '
        f"</answer>.\"`), or remove '{name}'."
        for name, text in required.items()
        if text is not None and not any(text in prompt for prompt in texts)
    ]


def dropped_tags(reward_funcs: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns a warning if tags that rewards look for are special tokens, which completions lose when decoded."""
    tags = {"<answer>", *filter(None, (getattr(func, "required_in_prompt", None) for func in reward_funcs))}
    tags |= {f"</{tag[1:]}" for tag in tags if tag.startswith("<")}
    dropped = sorted(tags & control_tokens(tokenizer))
    if not dropped:
        return []
    return [
        f"Rewards never see {', '.join(f'`{tag}`' for tag in dropped)}, since decoding drops special tokens of the "
        'tokenizer. Set `"special": false` for them in the tokenizer.json of the model, or ask for another form, such '
        "as `\\boxed{}`."
    ]


def checked_reward(
    reward_func: Callable,
    name: str | None = None,
    media_rules: MediaRules | None = None,
    rows: Sequence[int] | None = None,
    turns: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Callable:
    """
    Wraps a reward function so that wrong parameters and return values raise an error. `rows` has each completion's row
    index; for it and `turns`, see [`check_rewards`].
    """
    name = name or get_callable_name(reward_func)
    takes_rules = media_rules is not None and "media_rules" in inspect.signature(reward_func).parameters
    extra = {"media_rules": media_rules} if takes_rules else {}

    def prepare(columns: dict[str, Any]) -> PreparedCall:
        check_signature(reward_func, name, {**columns, **extra})
        finish = partial(check_rewards, n_completions=len(columns["completions"]), name=name, rows=rows, turns=turns)
        return {**columns, **extra}, _explain_errors(columns["completions"], rows, name), finish

    return wrap_reward(reward_func, name, prepare)


def wrap_reward(reward_func: Callable, name: str, prepare: Callable[[dict[str, Any]], PreparedCall]) -> Callable:
    """
    Wraps a sync or async reward function. `prepare` gets the wrapper's arguments, and returns the function's arguments
    (`None` skips the call), a context for errors, and a function that converts rewards to the wrapper's result.
    """
    if is_async_callable(reward_func):

        async def wrapper(
            prompts: Sequence[Any], completions: Sequence[Completion], **columns: Argument
        ) -> list[float | None]:
            arguments, context, finish = prepare({"prompts": prompts, "completions": completions, **columns})
            with context:
                rewards = [] if arguments is None else await reward_func(**with_labels(reward_func, name, arguments))
            return finish(rewards)

    else:

        def wrapper(
            prompts: Sequence[Any], completions: Sequence[Completion], **columns: Argument
        ) -> list[float | None]:
            arguments, context, finish = prepare({"prompts": prompts, "completions": completions, **columns})
            with context:
                rewards = [] if arguments is None else reward_func(**with_labels(reward_func, name, arguments))
            return finish(rewards)

    wrapper.__name__ = name
    vars(wrapper)["required_in_prompt"] = getattr(reward_func, "required_in_prompt", None)
    return wrapper


def check_rewards(
    rewards: Returned,
    n_completions: int,
    name: str,
    rows: Sequence[int] | None = None,
    turns: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[float | None]:
    """
    Returns the rewards of a function as a list. Errors name rows by `rows`. With `turns`, token spans (start, stop), a
    reward may be a list: one number per turn, or pairs (index of a step's last token, reward).
    """
    source = f"The reward function '{name}' returned"
    try:
        if isinstance(rewards, (dict, str)):
            raise TypeError
        values: list = list(rewards)  # pyrefly: ignore[bad-argument-type]
    except TypeError:  # arrays and tensors without a dimension raise it, too
        raise ValueError(
            f"{source} {rewards!r} for {n_completions} completions; return a list with one number for each, or None "
            "where the reward doesn't apply."
        ) from None
    if len(values) != n_completions:
        raise ValueError(f"{source} {len(values)} rewards for {n_completions} completions; return one per completion.")
    # If any array has several numbers, all arrays hold rewards per turn, even an array of one number
    has_turn_rewards = turns is not None and any(_is_vector(reward) and len(reward) > 1 for reward in values)
    for position, reward in enumerate(values):
        value = reward.tolist() if has_turn_rewards and _is_vector(reward) else _plain(reward)
        label = f"completion {position}" if rows is None else f"row {rows[position]}"
        if turns is not None and isinstance(value, (list, tuple)):
            value = _stepwise_reward([*map(_plain, value)], turns[position], source, label)
        if value is not None and not is_finite(value):
            raise ValueError(
                f"{source} {value!r:.40} for {label}; return a finite number, or None where the reward doesn't apply. "
                "Rewards are float32, up to 3.4e38."
            )
        values[position] = value
    return values


def _is_vector(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 1


def _plain(value: Any) -> Any:
    """Converts an array or tensor to a list, or to a number if it has one element. Returns other values unchanged."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def _stepwise_reward(values: list[Any], turns: Sequence[tuple[int, int]], source: str, label: str) -> StepwiseReward:
    """
    Returns the reward of a completion from numbers per turn, or from pairs (last token, reward). With the turns
    [(0, 3), (5, 8)], the numbers [0.5, 1.0] are the pairs [(2, 0.5), (7, 1.0)].
    """
    if not any(isinstance(step, (list, tuple)) for step in values):
        if len(values) != len(turns):
            raise ValueError(
                f"{source} rewards of {len(values)} turns for {label}, whose completion has {len(turns)}; return one "
                "number per turn, or (last token, reward) pairs. Turns are the assistant's messages in `completion`."
            )
        values = [(stop - 1, value) for (_, stop), value in zip(turns, values, strict=True)]
    steps: list[tuple[int, float]] = []
    for step in values:
        is_pair = isinstance(step, (list, tuple)) and len(step) == 2
        end = _plain(step[0]) if is_pair else None
        reward = _plain(step[1]) if is_pair else None
        is_sampled = type(end) is int and any(start <= end < stop for start, stop in turns)
        if not is_sampled or not is_finite(reward) or steps and end <= steps[-1][0]:
            spans = ", ".join(f"{start} to {stop - 1}" for start, stop in turns)
            raise ValueError(
                f"{source} the step {step!r:.40} for {label}; return pairs (index of a sampled token, finite number) "
                f"in the order of the indices. The sampled tokens are {spans}."
            )
        steps.append((cast(int, end), float(cast(float, reward))))
    return StepwiseReward.of(steps)


def is_finite(value: str | float | list | dict | None) -> bool:
    """Returns whether a value is a number that float32, the dtype of rewards, can hold."""
    return isinstance(value, Real) and abs(cast(float, value)) <= LARGEST_REWARD


def reward_tensor(rewards: Returned | torch.Tensor, n_completions: int, name: str) -> torch.Tensor:
    """Returns the rewards of a reward function, float32 on the CPU, shape `(n_completions,)`, `NaN` for `None`."""
    if isinstance(rewards, torch.Tensor):
        if rewards.shape != (n_completions,):
            raise ValueError(
                f"'{name}' returned rewards of shape {tuple(rewards.shape)} for {n_completions} completions; return "
                "one reward per completion."
            )
        rewards = [None if math.isnan(value) else value for value in rewards.tolist()]
    values = check_rewards(rewards, n_completions, name)
    return torch.tensor([math.nan if value is None else float(value) for value in values])


def distinct_names(names: Sequence[str]) -> list[str]:
    """Returns names for metrics. Duplicates, such as the names of two lambdas, get `_2`, `_3` and so on."""
    distinct: list[str] = []
    for name in names:
        # A name with a suffix must also differ from the names without a suffix
        unique = name
        suffix = 1
        while unique in distinct or suffix > 1 and unique in names:
            suffix += 1
            unique = f"{name}_{suffix}"
        distinct.append(unique)
    return distinct


def reward_arguments(
    prompts: Sequence[Any], completions: Sequence[Any], ids: Sequence[Sequence[int]], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the keyword arguments of reward functions, with the names of TRL's trainers."""
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in _NOT_FOR_REWARDS]
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": ids,
    }


def call_rewards(
    reward_funcs: Mapping[str, Callable],
    arguments: dict[str, Any],
    loop: asyncio.AbstractEventLoop | None,
    profile: Callable[[str], AbstractContextManager] = nullcontext,
) -> dict[str, list[float | None]]:
    """Returns rewards by function name. Async functions run concurrently in `loop`, after the sync functions."""
    results: dict[str, Any] = {}
    for name, reward_func in reward_funcs.items():
        if not is_async_callable(reward_func):
            with profile(name):
                results[name] = reward_func(**arguments)
    async_funcs = {name: value for name, value in reward_funcs.items() if name not in results}
    if async_funcs and loop is not None:

        async def call(name: str) -> list[float | None]:
            with profile(name):
                return await async_funcs[name](**arguments)

        async def call_all() -> list:
            return await asyncio.gather(*map(call, async_funcs))

        results |= zip(async_funcs, asyncio.run_coroutine_threadsafe(call_all(), loop).result(), strict=True)
    unchanged_types = (type(None), StepwiseReward)  # `float` would drop the steps
    return {
        name: [value if isinstance(value, unchanged_types) else float(value) for value in results[name]]
        for name in reward_funcs
    }


@contextmanager
def reward_loop(reward_funcs: Sequence[Callable]) -> Iterator[asyncio.AbstractEventLoop | None]:
    """
    Yields an event loop that runs in another thread, because a notebook's main thread already runs one; `None` without
    async functions.
    """
    if not any(is_async_callable(reward_func) for reward_func in reward_funcs):
        yield None
        return
    thread, loop, ready = start_event_loop_in_daemon(name="evaluation")
    ready.wait()
    try:
        yield loop
    finally:
        shutdown_event_loop_in_daemon(thread, loop)
