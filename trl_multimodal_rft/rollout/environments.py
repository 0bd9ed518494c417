# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tools and environments of a trainer or an evaluation, by the rules of TRL's GRPO trainer."""

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import numpy as np
import PIL.Image
import torch
from accelerate.logging import get_logger
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import get_json_schema
from trl.chat_template_utils import get_training_chat_template

from ..data.reading.refs import MediaError, shortened
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.columns import blocks_to_refs
from ..data.rows.values import block_modality, media_in, named_modality, read_value, unread_part
from ..encoding.conversations import keeps_earlier_turns
from ..modalities import MODALITIES
from ..rewards.calls import Argument, distinct_names


logger = get_logger(__name__)

# Methods of environments that aren't tools
_NOT_TOOLS = ("reset", "get_reward", "get_context")

# Messages that stand for a prompt until an environment makes it
_NO_PROMPT = [{"role": "user", "content": ""}]


# What tools and environments return
Result = str | float | list | tuple | dict | np.ndarray | torch.Tensor | PIL.Image.Image | None


class EnvironmentFailure(Exception):
    """
    Failure of an environment that can't go on, for instance because its server is down. The environment's `reset`,
    tools, `get_context` and `get_reward` may raise it.

    The failure ends the trajectory. A failed trajectory gets no reward and is left out of the loss. Other errors of
    tools are results that the model reads. Other errors of `reset`, `get_context` and `get_reward` count as this
    failure.
    """


class Environments:
    """
    Tools of all completions, and environments, whose methods are tools of a single one. With several factories by
    name, the column `environment` names one. Raises a `TypeError` or `ValueError` for what can't be called, reset, or
    described to the model.
    """

    def __init__(
        self,
        tools: Sequence[Callable] = (),
        factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        media_rules: MediaRules = DEFAULT_RULES,
    ):
        if callable(tools) or isinstance(tools, str) or not all(map(callable, tools)):
            raise TypeError(
                f"`tools` is {shortened(tools)}; pass a list of functions, such as `tools=[search]`. Names such as "
                "'zoom' are for the command line; in Python, pass `environment_factory=Zoom`."
            )
        for tool in tools:
            if isinstance(tool, type):
                raise TypeError(
                    f"`tools` has the class {tool.__name__}, but a tool is a function; pass a class of environments "
                    "as `environment_factory`."
                )
        self.standalone_tools = list(tools)
        self.factory = factory
        self.media_rules = media_rules
        self.has_several_factories = isinstance(factory, dict)
        self.factories: dict[Any, Callable] = {}
        if factory is not None:
            self.factories = {**factory} if isinstance(factory, dict) else {None: factory}
        # Environments by factory, which each rollout resets. The first environment of a factory shows the tools, and
        # whether there is a reward. `reset_all` adds environments if a rollout needs more.
        self.pools = {name: [_make_environment(make)] for name, make in self.factories.items()}
        for [environment] in self.pools.values():
            if not callable(getattr(environment, "reset", None)):
                raise ValueError("Each environment that `environment_factory` returns must have a method `reset`.")
            for name in ("reset", "get_context"):
                method = getattr(environment, name, None)
                if method is not None:
                    _check_method(f"`{type(environment).__name__}.{name}`", method, name == "get_context")
        for tool in self.tools:
            _check_description(tool)
        self.tools_by_name = {tool.__name__: tool for tool in self.standalone_tools}

    @property
    def tools(self) -> list[Callable]:
        """Tools of all completions and environments, without duplicates."""
        callables = list(self.standalone_tools)
        for environment, *_ in self.pools.values():
            callables += [method for method in tools_of(environment).values() if method not in callables]
        return callables

    def tools_in(self, environment: Any) -> dict[str, Callable]:
        """Returns a completion's tools by name: standalone tools, and tools of its environment."""
        return {**self.tools_by_name, **tools_of(environment)}

    def tools_by_factory(self) -> dict[Any, list[Callable]]:
        """Returns the tools of completions with an environment, by the name of its factory."""
        tools = {}
        for name, [environment, *_] in self.pools.items():
            tools[name] = [*self.tools_in(environment).values()]
        return tools

    def reward_funcs(self) -> dict[str, Callable]:
        """Returns a reward function for each class of environments with `get_reward`, by the name of the class."""
        classes = dict.fromkeys(type(environment) for environment, *_ in self.pools.values())
        rewarding = [cls for cls in classes if hasattr(cls, "get_reward")]
        return dict(zip(distinct_names([cls.__name__ for cls in rewarding]), map(reward_of, rewarding), strict=True))

    def with_new_environments(self) -> "Environments":
        """Returns the same tools, with new environments of the same factories."""
        return Environments(self.standalone_tools, self.factory, self.media_rules)

    def reset_all(
        self,
        prompts: Sequence[Any],
        rows: Sequence[Mapping[str, Any]],
        row_indices: Sequence[int],
        check: Callable[[Any, str], Any],
    ) -> tuple[list[Any], list[Any], list[Exception | None]]:
        """
        Resets an environment for each completion, with its row and the prompt, `None` where an environment makes it.
        Returns environments, prompts that end with the observations, and errors of `reset` or `None`. `check` gets an
        observation and a label of its origin, for control tokens.
        """
        names = [self._factory_name(row) for row in rows]
        prompts = [[{"role": "user", "content": item}] if isinstance(item, str) else item for item in prompts]
        n_used: Counter[Any] = Counter()
        environments = []
        messages = []
        failures: list[Exception | None] = [None] * len(rows)
        for i, (name, prompt, row, row_index) in enumerate(zip(names, prompts, rows, row_indices, strict=True)):
            pool = self.pools[name]
            if n_used[name] == len(pool):
                pool.append(self.factories[name]())
            environment = pool[n_used[name]]
            n_used[name] += 1
            label = f"{type(environment).__name__}.reset"
            columns = self._reset_arguments(environment.reset, label, row, prompt)
            observation = None
            with _store_error(failures, i):
                content = environment.reset(**columns)
                if content is not None:
                    content = as_content(
                        content, f"`{label}`", label, row_index, self.media_rules, are_lists_blocks=True
                    )
                observation = content and check(content, f"row {row_index}, `{label}`")
            environments.append(environment)
            messages.append(_with_observation(_NO_PROMPT if prompt is None else prompt, observation))
        return environments, messages, failures

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises an error if a row names no environment, or if `reset` of its environment can't get its columns."""
        if self.factories:
            environment = self.pools[self._factory_name(row)][0]
            self._reset_arguments(environment.reset, f"{type(environment).__name__}.reset", row, None)

    def _factory_name(self, row: Mapping[str, Any]) -> str | None:
        name = row.get("environment") if self.has_several_factories else None
        if name not in self.factories:
            raise ValueError(
                f"A row has `environment={name!r}`, but `environment_factory` has only {list(self.factories)}; "
                "correct the column or add the environment."
            )
        return name

    def _reset_arguments(
        self, reset: Callable, label: str, row: Mapping[str, Any], prompt: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        # With several factories, the column `environment` names one and isn't passed to `reset`, as in TRL
        columns = {key: row[key] for key in row if key != "environment" or not self.has_several_factories}
        signature = inspect.signature(reset)
        if "prompt_messages" in signature.parameters:
            columns["prompt_messages"] = prompt
        try:
            signature.bind(**columns)
        except TypeError as error:
            raise TypeError(
                f"`{label}` can't be called with the columns {[*columns]} ({error}). Add `**row` as its last "
                "parameter, and a default to parameters whose column may be missing."
            ) from None
        return columns


def as_content(
    result: Result,
    origin: str,
    path: str,
    row_index: int,
    rules: MediaRules,
    context_texts: Collection[str] = (),
    are_lists_blocks: bool = False,
) -> str | list[dict[str, Any]]:
    """
    Returns a result as the content of a message: blocks if it has media, see [`~data.rows.values.read_value`], else
    text. A text is never opened, as it may be the model's own; a warning says so for files, except for
    `context_texts`. Media elsewhere and objects without a text are a [`MediaError`].
    """
    result = _from_mcp(result)
    is_list = isinstance(result, (list, tuple)) and read_value(result).kind == "parts"
    items = [*map(_from_mcp, result)] if is_list else [result]
    blocks = [_block_of(item) for item in items]
    is_list_of_blocks = isinstance(result, list) and (
        are_lists_blocks or all(isinstance(item, dict) and "type" in item for item in map(_mcp_fields, result))
    )
    if is_list_of_blocks or any(block is not None for block in blocks):
        unread = next((reading.objection for reading in map(read_value, items) if reading.kind == "objection"), None)
        if unread is not None:
            raise MediaError(
                f"{origin} returned a list with an item {unread}, which the model would not get; return its content"
            )
        blocks = [item if block is None else block for item, block in zip(items, blocks, strict=True)]
        blocks = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
        parsed = blocks_to_refs(blocks, path, row_index, rules)
        content: str | list[dict[str, Any]] = parsed
        texts = [block.get("text") for block in parsed]
    else:
        unread = None if isinstance(result, str) else unread_part(result, "result")
        if unread is not None:
            raise MediaError(
                f"{origin} returned {unread} that the model would not get; return a list of content blocks, such as "
                "[{'type': 'image', 'image': ...}, {'type': 'text', 'text': ...}], or text"
            )
        content = str(result)
        texts = [reading.value for _, reading in media_in(result)]
    for text in texts:
        modality = named_modality(text) if isinstance(text, str) and text not in context_texts else None
        if modality is not None:
            logger.warning_once(
                f"{origin} returned a text that names a file or is a `data:` URI. Texts aren't opened, so the model "
                f"reads the text alone; to show the medium, return [{{'type': '{modality}', '{modality}': ...}}]."
            )
    return content


def _block_of(item: Result) -> dict[str, Any] | None:
    """Returns a content block for a medium, `None` for text, for media inside of an item, and for unknown media."""
    reading = read_value(item)
    if isinstance(item, os.PathLike) or reading.kind != "medium" or reading.modality is None:
        return None
    is_block = isinstance(reading.value, dict) and block_modality(reading.value.get("type")) is not None
    return reading.value if is_block else {"type": reading.modality, reading.modality: reading.value}


def is_error_of_mcp(result: Result) -> bool:
    """Returns whether a tool's result is one of MCP that says that the tool failed."""
    fields = _mcp_fields(result)
    return isinstance(fields.get("content"), list) and bool(fields.get("isError") or fields.get("is_error"))


def _from_mcp(result: Result) -> Result:
    """Returns the content of a result of MCP, and a block of MCP as a dictionary; other values unchanged."""
    fields = _mcp_fields(result)
    if isinstance(fields.get("content"), list) and fields.keys() & {"isError", "is_error"}:
        return fields["content"]
    is_block = fields.get("type") in ("text", "resource", "resource_link", *MODALITIES)
    if not is_block:
        return result
    reading = read_value(fields)
    return reading.value if reading.kind == "text" else fields


def _mcp_fields(result: Result) -> dict[str, Any]:
    dump = getattr(result, "model_dump", None)
    fields = dump(exclude_none=True) if callable(dump) else result
    return fields if isinstance(fields, dict) else {}


def _check_method(label: str, method: Callable, gets_messages: bool) -> None:
    """Raises a `TypeError` for a method of an environment that is async, or can't be called with the messages."""
    if not callable(method) or inspect.iscoroutinefunction(method):
        raise TypeError(f"{label} must be a method that isn't async; write it with `def`.")
    try:
        if gets_messages:
            inspect.signature(method).bind([])
    except TypeError as error:
        raise TypeError(f"{label} can't be called with the messages ({error}); give it one parameter.") from None


def _make_environment(factory: Callable[[], Any]) -> Any:
    if not callable(factory):
        raise TypeError(
            f"`environment_factory` is {shortened(factory)}, which can't be called; pass the class itself, or a "
            "function that makes an environment."
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise TypeError(
            f"`environment_factory` {name!r} is called without arguments and fails ({error}); pass "
            f"`functools.partial({name}, ...)`."
        ) from None
    except ValueError:  # some builtins have no signature
        pass
    return factory()


def _check_description(tool: Callable) -> None:
    name = getattr(tool, "__qualname__", type(tool).__name__)
    try:
        get_json_schema(tool)
    except Exception as error:
        raise ValueError(
            f"The tool `{name}` can't be described to the model: {' '.join(str(error).split()).rstrip('.')}. "
            "Annotate its arguments, and name them in a docstring with a section `Args:`."
        ) from error


def rows_for_environments(factory: Callable | dict[str, Callable] | None, args: Any) -> Dataset:
    """
    Returns rows whose prompts an environment makes, as many as a generation batch has prompts.

    Raises `ValueError` without `max_steps`, or with several environments.
    """
    if factory is None:
        raise ValueError("`train_dataset` is required, unless an `environment_factory` has the data.")
    if isinstance(factory, dict):
        raise ValueError(
            "With multiple environments, `train_dataset` is required: its column `environment` names each row's "
            "environment."
        )
    if args.max_steps <= 0:
        raise ValueError("Without a `train_dataset`, `max_steps` must be set: nothing else ends the run.")
    return Dataset.from_dict({"prompt": [_NO_PROMPT] * (args.generation_batch_size // args.num_generations)})


def template_for_tools(processing_class: ProcessorMixin | PreTrainedTokenizerBase) -> str | None:
    """Returns TRL's chat template for training if the model's template rewrites earlier turns, else `None`."""
    return None if keeps_earlier_turns(processing_class) else get_training_chat_template(processing_class)


def tools_of(environment: Any) -> dict[str, Callable]:
    """Returns the tools of an environment by name: its public methods, except for `_NOT_TOOLS`."""
    names = (name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction))
    return {name: getattr(environment, name) for name in names if name not in _NOT_TOOLS and not name.startswith("_")}


def reward_of(environment_class: type) -> Callable:
    """
    Returns a reward function that calls `get_reward` of a class, sync or async, with `completion` if it takes it.
    `None` for environments that failed or have another class. Errors go into `failures`, or are raised if that is
    `None`.
    """
    reads_completion = "completion" in inspect.signature(environment_class.get_reward).parameters

    def call(
        environments: list[Any], completions: Sequence = (), failures: list | None = None, **columns: Argument
    ) -> list[Any]:
        rewards: list[Any] = [None] * len(environments)
        for i, environment in enumerate(environments):
            if type(environment) is environment_class and (failures is None or failures[i] is None):
                with _store_error(failures, i):
                    rewards[i] = environment.get_reward(**{"completion": completions[i]} if reads_completion else {})
        return rewards

    async def call_and_wait(
        environments: list[Any], completions: Sequence = (), failures: list | None = None, **columns: Argument
    ) -> list[Any]:
        # An async `get_reward` returns an awaitable, so `call` returns awaitables in place of rewards
        async def settle(i: int, reward: Awaitable[float] | None) -> float | None:
            with _store_error(failures, i):
                return None if reward is None else await reward

        return await asyncio.gather(*starmap(settle, enumerate(call(environments, completions, failures))))

    reward: Callable = call_and_wait if inspect.iscoroutinefunction(environment_class.get_reward) else call
    reward.__name__ = environment_class.__name__
    vars(reward)["stores_failures"] = True
    return reward


def as_error(exit: SystemExit) -> Exception:
    """Returns an error in place of `SystemExit`, with which a tool or an environment would end the run."""
    return RuntimeError(f"it called `sys.exit({exit.code!r})`")


@contextmanager
def _store_error(failures: list[Exception | None] | None, index: int) -> Iterator[None]:
    """Stores an error of the context at an index of `failures`, or raises the error if `failures` is `None`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures[index] = error if isinstance(error, Exception) else as_error(error)


def _with_observation(
    prompt: list[dict[str, Any]], observation: str | list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Returns the prompt with an environment's first observation at the end of its last message."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
