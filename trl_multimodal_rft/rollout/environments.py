# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tools and environments of a trainer or an evaluation, by the rules of TRL's GRPO trainer."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import get_json_schema
from trl.chat_template_utils import get_training_chat_template

from ..data.reading.refs import shortened
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.columns import blocks_to_refs
from ..encoding.conversations import keeps_earlier_turns
from ..rewards.checks import Argument, distinct_names


# Methods of environments that aren't tools
_NO_TOOLS = ("reset", "get_reward", "get_context")

# Where an environment makes the prompt
_NO_PROMPT = [{"role": "user", "content": ""}]


class EnvironmentFailure(Exception):
    """
    An environment that can't go on, as when its server is gone; its `reset`, tools, `get_context` and `get_reward` may
    raise it.

    It ends the trajectory, which neither is in the loss nor has a reward that others of its group are compared with.
    Other errors of tools are results that the model reads; other errors of the remaining methods become this one.
    """


class Environments:
    """
    Tools that all completions have, and environments whose methods are tools of one completion each.

    Args:
        tools (`Sequence[Callable]`):
            Tools of all completions.
        factory (`Callable` or `dict[str, Callable]`, *optional*):
            Makes environments. Of several, the column `environment` of a row names one.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Restrictions on the media that environments return.

    Raises:
        `TypeError`: If tools are no functions, or a factory can't be called without arguments.
        `ValueError`: If an environment has no method `reset`, or a tool no description that TRL could read.
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
        self.standalone, self.factory = list(tools), factory
        self.media_rules = media_rules
        self.several = isinstance(factory, dict)
        self.factories: dict[Any, Callable] = {}
        if factory is not None:
            self.factories = {**factory} if isinstance(factory, dict) else {None: factory}
        # One of each kind, to know its tools and whether it gives a reward
        self.pool = {name: [_made(make)] for name, make in self.factories.items()}
        for [environment] in self.pool.values():
            if not callable(getattr(environment, "reset", None)):
                raise ValueError("Each environment that `environment_factory` returns must have a method `reset`.")
        for tool in self.tools:
            _check_description(tool)

    def __bool__(self) -> bool:
        return bool(self.factories)

    @property
    def tools(self) -> list[Callable]:
        """Tools of all completions and environments, without duplicates."""
        found = list(self.standalone)
        for environment, *_ in self.pool.values():
            found += [method for method in tools_of(environment).values() if method not in found]
        return found

    def tools_in(self, environment: Any) -> dict[str, Callable]:
        """Tools of a completion in an environment, or in none, by name."""
        return {**{tool.__name__: tool for tool in self.standalone}, **tools_of(environment)}

    def reward_funcs(self) -> dict[str, Callable]:
        """A reward function for each kind of environment that has `get_reward`, by the name of its class."""
        kinds = dict.fromkeys(type(environment) for environment, *_ in self.pool.values())
        rewarded = [kind for kind in kinds if hasattr(kind, "get_reward")]
        return dict(zip(distinct_names([kind.__name__ for kind in rewarded]), map(reward_of, rewarded), strict=True))

    def fresh(self) -> "Environments":
        return Environments(self.standalone, self.factory, self.media_rules)

    def enter(
        self,
        prompts: Sequence[Any],
        rows: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        check: Callable[[Any, str], Any],
    ) -> tuple[list[Any], list[Any], list[Exception | None]]:
        """
        Resets an environment for each completion. A `reset` with the parameter `prompt_messages` gets the prompt with
        references to its media.

        Args:
            prompts (`Sequence`):
                Prompts as messages; `None` where an environment makes the prompt.
            rows (`Sequence[dict]`):
                Rows as the dataset has them, which `reset` gets.
            numbers (`Sequence[int]`):
                Numbers of the rows, for errors.
            check (`Callable`):
                Returns an observation without control tokens, or raises about them; gets its origin, too.

        Returns:
            `tuple`: Environments, prompts that end with their observations, and what `reset` has raised, without which
                there is no observation.

        Raises:
            `ValueError`: If a row names an unknown environment.
        """
        names = [row.get("environment") if self.several else None for row in rows]
        for name in names:
            if name not in self.factories:
                raise ValueError(
                    f"A row has `environment={name!r}`, which `environment_factory` doesn't have; it has "
                    f"{list(self.factories)}."
                )
        taken: Counter[Any] = Counter()
        environments, shown = [], []
        failures: list[Exception | None] = [None] * len(rows)
        for i, (name, prompt, row, number) in enumerate(zip(names, prompts, rows, numbers, strict=True)):
            pool = self.pool[name]
            if taken[name] == len(pool):
                pool.append(self.factories[name]())
            environment = pool[taken[name]]
            taken[name] += 1
            # With several environments, the column only chooses one, as in TRL
            columns = {key: value for key, value in row.items() if key != "environment" or not self.several}
            place, signature = f"{type(environment).__name__}.reset", inspect.signature(environment.reset)
            if "prompt_messages" in signature.parameters:
                columns["prompt_messages"] = prompt
            try:
                signature.bind(**columns)
            except TypeError as error:
                raise TypeError(
                    f"`{place}` can't be called with the columns {[*columns]} ({error}); end its parameters with "
                    "`**row`, and give those that rows may lack a default."
                ) from None
            observation = None
            with _noting(failures, i):
                content = environment.reset(**columns)
                if isinstance(content, list):
                    content = blocks_to_refs(content, place, number, self.media_rules)
                elif not isinstance(content, str | None):
                    content = str(content)
                observation = content and check(content, f"row {number}, `{place}`")
            environments.append(environment)
            shown.append(_with_observation(_NO_PROMPT if prompt is None else prompt, observation))
        return environments, shown, failures


def _made(factory: Callable[[], Any]) -> Any:
    """An environment of a factory, or a `TypeError` of one line where it can't be called."""
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
            f"`environment_factory` {name!r} is called without arguments ({error}); pass "
            f"`functools.partial({name}, ...)`."
        ) from None
    except ValueError:  # of builtins
        pass
    return factory()


def _check_description(tool: Callable) -> None:
    """Raises a `ValueError` about a tool whose name, docstring or annotations the model can't be shown."""
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
    Rows whose prompts an environment makes, as many as a generation batch has.

    Raises `ValueError` without `max_steps`, or with several environments.
    """
    if factory is None:
        raise ValueError("`train_dataset` is required, unless an `environment_factory` has the data.")
    if isinstance(factory, dict):
        raise ValueError(
            "With multiple environments, `train_dataset` is required: its column `environment` names that of each row."
        )
    if args.max_steps <= 0:
        raise ValueError("Without a `train_dataset`, `max_steps` must be set: nothing else ends the run.")
    return Dataset.from_dict({"prompt": [_NO_PROMPT] * (args.generation_batch_size // args.num_generations)})


def template_for_tools(processing_class: ProcessorMixin | PreTrainedTokenizerBase) -> str | None:
    """TRL's chat template for training, if the model's own rewrites earlier turns once others follow; else `None`."""
    return None if keeps_earlier_turns(processing_class) else get_training_chat_template(processing_class)


def tools_of(environment: Any) -> dict[str, Callable]:
    names = (name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction))
    return {name: getattr(environment, name) for name in names if name not in _NO_TOOLS and not name.startswith("_")}


def reward_of(kind: type) -> Callable:
    """
    A reward function from `get_reward` of a class, plain or async, which gets its `completion` if it has this
    parameter; `None` for other environments and failed ones. What `get_reward` raises is noted in any `failures`.
    """
    reads_completion = "completion" in inspect.signature(kind.get_reward).parameters

    def call(
        environments: list[Any], completions: Sequence = (), failures: list | None = None, **columns: Argument
    ) -> list[Any]:
        rewards: list[Any] = [None] * len(environments)
        for i, each in enumerate(environments):
            if type(each) is kind and (failures is None or failures[i] is None):
                with _noting(failures, i):
                    rewards[i] = each.get_reward(**{"completion": completions[i]} if reads_completion else {})
        return rewards

    async def call_and_wait(
        environments: list[Any], completions: Sequence = (), failures: list | None = None, **columns: Argument
    ) -> list[Any]:
        async def settle(i: int, reward: Awaitable[float] | None) -> float | None:
            with _noting(failures, i):
                return None if reward is None else await reward

        return await asyncio.gather(*starmap(settle, enumerate(call(environments, completions, failures))))

    reward: Callable = call_and_wait if inspect.iscoroutinefunction(kind.get_reward) else call
    reward.__name__, vars(reward)["notes_failures"] = kind.__name__, True
    return reward


def as_error(exit: SystemExit) -> Exception:
    """The error in place of an exit, by which code of a tool or an environment would end the run."""
    return RuntimeError(f"it called `sys.exit({exit.code!r})`")


@contextmanager
def _noting(failures: list[Exception | None] | None, index: int) -> Iterator[None]:
    """Notes an error within the context, and goes on; raises it where nothing takes notes."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures[index] = error if isinstance(error, Exception) else as_error(error)


def _with_observation(prompt: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """A prompt whose last message ends with an environment's first observation."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
