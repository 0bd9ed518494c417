# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tools, environments and rollouts of the user's for trainers of TRL that have none, by the rules of those that do."""

import atexit
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trl.trainer.utils import is_async_callable, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..models.trainer_mixin import TrainerMixin


# Methods of environments that aren't tools
_NO_TOOLS = ("reset", "get_reward")


class OwnToolsMixin(TrainerMixin):
    """Gives a trainer of TRL what its GRPO trainer has: `tools`, `environment_factory` and `rollout_func`."""

    _batch: Any

    def __init__(self, *args, tools=None, environment_factory=None, rollout_func=None, **kwargs):
        # Read while the trainer is set up
        self.tools: list[Callable] = []
        self.environment_factories = self.environments = self.chat_template = None
        self.rollout_func = rollout_func
        kwargs["reward_funcs"] = [] if kwargs.get("reward_funcs") is None else kwargs["reward_funcs"]
        if kwargs.get("train_dataset") is None:
            kwargs["train_dataset"] = _empty_rows(environment_factory, kwargs["args"])
        super().__init__(*args, **kwargs)
        limit = self.args.max_tool_calling_iterations
        self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        self._standalone_tools = list(tools or [])
        self.tools = list(self._standalone_tools)
        self._multi_environment = isinstance(environment_factory, dict)
        if environment_factory is not None:
            self._set_environments(environment_factory)
        if not self.reward_funcs:
            raise ValueError("No reward source: pass `reward_funcs`, or an environment with a method `get_reward`.")
        if self.tools:
            self.chat_template = template_for_tools(self.processing_class)
        if not self._has_async_funcs and any(map(is_async_callable, [*self.tools, *self.reward_funcs])):
            self._has_async_funcs = True
            thread, self.async_loop, ready = start_event_loop_in_daemon(name=f"{type(self).__name__}-AsyncLoop")
            ready.wait()
            atexit.register(shutdown_event_loop_in_daemon, thread, self.async_loop)

    def _set_environments(self, given: Any) -> None:
        """Makes one environment of each kind, to know its tools and whether it gives a reward."""
        self.environment_factories = given if self._multi_environment else {None: given}
        self._environment_pool = {name: [factory()] for name, factory in self.environment_factories.items()}
        self._env_tools = {}
        for name, (environment,) in self._environment_pool.items():
            if not callable(getattr(environment, "reset", None)):
                raise ValueError("Each environment that `environment_factory` returns must have a method `reset`.")
            methods = list(tools_of(environment).values())
            self._env_tools[name] = self._standalone_tools + methods
            self.tools += [method for method in methods if method not in self.tools]
        kinds = {type(environment): None for (environment,) in self._environment_pool.values()}
        for kind in (each for each in kinds if hasattr(each, "get_reward")):
            self.reward_funcs.append(reward_of(kind))
            self.reward_func_names.append(kind.__name__)
            self.reward_processing_classes.append(None)
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])

    # Rollout

    def _generate_and_score_completions(self, inputs):
        if self.environment_factories is not None:
            inputs = self._enter_environments(inputs)
        if self.tools:
            own = self.environments or [None] * len(inputs)
            tools = [
                {**{tool.__name__: tool for tool in self._standalone_tools}, **tools_of(environment)}
                for environment in own
            ]
            self._sync_tool_dicts, self._async_tool_dicts = (
                [{k: v for k, v in own.items() if inspect.iscoroutinefunction(v) == waits} for own in tools]
                for waits in (False, True)
            )
        return super()._generate_and_score_completions(inputs)

    def _enter_environments(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Resets an environment for each row, and adds to its prompt what that shows."""
        self._batch_environments = [row.get("environment") if self._multi_environment else None for row in inputs]
        self.environments, rows = enter(inputs, self.environment_factories, self._environment_pool)
        return rows

    def _generate(self, prompts):
        batch = self._batch
        if batch is None or not (self.tools or self.rollout_func is not None):
            return super()._generate(prompts)
        trainer: Any = self
        prompt_ids, ids, mask, completions, logps, extra, *_ = GRPOTrainer._generate(trainer, prompts)
        batch.tool_mask, batch.sampled_logps, batch.extra = mask, logps, extra
        return prompt_ids, ids, completions

    @property
    def _sampling_logps_expected(self) -> bool:
        return bool(self.tools) or self.rollout_func is not None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        extra = dict(self._batch.extra or {}) if self._batch is not None else {}
        if self.environments is not None:
            extra["environments"] = self.environments
        inputs = [
            {**row, **{key: each[i] if isinstance(each, list) else each for key, each in extra.items()}}
            for i, row in enumerate(inputs)
        ]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)


def _empty_rows(environment_factory: Any, args: Any) -> Dataset:
    """Rows to which an environment gives their prompts, as many as one generation batch has."""
    if environment_factory is None:
        raise ValueError("`train_dataset` is required, unless an `environment_factory` has the data.")
    if isinstance(environment_factory, dict):
        raise ValueError(
            "With multiple environments, `train_dataset` is required: its column `environment` names that of each row."
        )
    if args.max_steps <= 0:
        raise ValueError("Without a `train_dataset`, `max_steps` must be set: nothing else tells when to stop.")
    n_rows = args.generation_batch_size // args.num_generations
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * n_rows})


def template_for_tools(processing_class: Any) -> str | None:
    """
    The chat template with which a conversation can go on as it began.

    Returns TRL's, where the own one writes earlier turns in another way once others follow; else `None`.
    """
    preserves = is_chat_template_prefix_preserving(processing_class)
    return None if preserves else get_training_chat_template(processing_class)


def enter(
    rows: Sequence[dict[str, Any]], factories: dict[str | None, Callable], pool: dict[str | None, list[Any]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Resets an environment for each row."""
    several = None not in factories
    names = [row.get("environment") if several else None for row in rows]
    for name in names:
        if name not in factories:
            raise ValueError(
                f"A row has `environment={name!r}`, which `environment_factory` doesn't have; it has "
                f"{list(factories)}."
            )
    taken: Counter[Any] = Counter()
    environments, shown = [], []
    for name, row in zip(names, rows, strict=True):
        if taken[name] == len(pool[name]):
            pool[name].append(factories[name]())
        environment = pool[name][taken[name]]
        taken[name] += 1
        environments.append(environment)
        kept = {key: value for key, value in row.items() if key != "environment" or not several}
        prompt = row.get("prompt", [{"role": "user", "content": ""}])
        shown.append({**row, "prompt": _with_observation(prompt, environment.reset(**kept))})
    return environments, shown


def tools_of(environment: Any) -> dict[str, Callable]:
    """The public methods of an environment."""
    names = (name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction))
    return {name: getattr(environment, name) for name in names if name not in _NO_TOOLS and not name.startswith("_")}


def reward_of(kind: type) -> Callable:
    """A reward function that asks environments of a kind, and says nothing of others."""
    if inspect.iscoroutinefunction(kind.get_reward):

        async def reward(environments, **kwargs):
            return [await each.get_reward() if type(each) is kind else None for each in environments]

    else:

        def reward(environments, **kwargs):
            return [each.get_reward() if type(each) is kind else None for each in environments]

    reward.__name__ = kind.__name__
    return reward


def _with_observation(prompt: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """A prompt whose last message goes on with what an environment shows at its start."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
