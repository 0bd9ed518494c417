# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The reward functions of a run, as one object that takes a batch of completions and returns numbers."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState
from trl.trainer.utils import is_async_callable

from ..data.reading.refs import iter_refs
from ..data.reading.rules import MediaRules
from ..data.rows.features import restore_media
from ..engines.in_flight import EarlyCalls, EarlyRewards
from ..rewards.calls import (
    call_rewards,
    checked_reward,
    distinct_names,
    dropped_tags,
    missing_instructions,
    reward_arguments,
)
from ..rewards.model import text_reward_func
from ..spelling import did_you_mean
from .rollout import Prompted
from .speech import SpeechDecoder


logger = get_logger(__name__)

P = TypeVar("P", bound=Prompted)


@dataclass
class RewardFunctions:
    """
    The reward functions of a run. Called with a [`~rollout.rollout.Prompted`], they return the rewards of its
    completions by the functions' names.

    Functions get TRL's arguments, with media as the dataset has them, and with a `speech_decoder` the sounds of the
    completions as `completion_audio`. A reward model that is an `nn.Module` reads the
    conversation as text, without its media. The trainer's attributes, such as `reward_func_names`, refer to the lists
    here.
    """

    names: list[str] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    processors: list[Any] = field(default_factory=list)  # of reward models, `None` for other functions
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of reward models
    logs: dict[str, Callable[..., None] | None] = field(default_factory=dict)  # TRL's `log_extra` and `log_metric`
    loop: AbstractEventLoop | None = None  # for asynchronous functions
    speech_decoder: SpeechDecoder | None = None  # of completions that are speech
    held_out: set[str] = field(default_factory=set)  # names of functions that aren't trained on
    were_called: bool = False  # whether they have rewarded a batch

    def __call__(
        self,
        rollout: Prompted,
        state: TrainerState,
        media_rules: MediaRules,
        profile: Callable[[str], Any] = nullcontext,
        early: EarlyRewards | None = None,
    ) -> dict[str, list[float | None]]:
        """
        Returns the rewards of a batch by function, `None` where a function doesn't apply or the environment failed.

        Functions whose rewards are in `early` aren't called again. `media_rules` are those of functions that load
        media, and `profile` measures the time of a call.
        """
        early = early or EarlyRewards({}, [])
        for key, *entry in early.log_entries:
            log = self.logs[key]
            if log is not None:
                log(*entry)
        checked = self._checked(rollout, media_rules)
        remaining = {name: function for name, function in checked.items() if name not in early.values}
        arguments = {**_arguments(self.with_sounds(rollout)), "trainer_state": state, **self.logs}
        rewards = call_rewards(remaining, arguments, self.loop, profile) | early.values
        return {name: _without_failed(rewards[name], rollout) for name in self.names}

    def call_early(
        self, rollout: Prompted, state: TrainerState, media_rules: MediaRules, calls: EarlyCalls
    ) -> EarlyRewards:
        """
        Calls the functions while the policy is trained, and returns their rewards and the entries that they log.

        Several threads may run this at once. `calls` then lets one thread at a time call a function that isn't async.
        """
        log_entries: list[tuple[str, str, Any]] = []
        # Stand-ins for `log_extra` and `log_metric`, which record their calls for a later call of this object
        logs = {key: partial(lambda *entry: log_entries.append(entry), key) for key in ("log_extra", "log_metric")}
        functions = self._checked(rollout, media_rules)
        for name, function in functions.items():
            if not is_async_callable(function):
                functions[name] = partial(calls, name, function)
        arguments = {**_arguments(self.with_sounds(rollout)), "trainer_state": state, **logs}
        return EarlyRewards(call_rewards(functions, arguments, self.loop), log_entries)

    def with_sounds(self, rollout: P) -> P:
        """Returns completions with their sounds, if there is a `speech_decoder`."""
        return rollout if self.speech_decoder is None else self.speech_decoder(rollout)

    def add(self, name: str, function: Callable) -> None:
        self.functions.append(function)
        self.names[:] = distinct_names([*self.names, name])
        self.processors.append(None)

    def hold_out(self, names: Sequence[str], weights: Any) -> None:
        """
        Sets the weights of functions that aren't trained on to 0. Raises `ValueError` for unknown names, or if no
        other function is left.
        """
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"`held_out_rewards` has {name!r}, but the reward functions are "
                    f"{', '.join(map(repr, self.names))}; name some of them.{did_you_mean(name, self.names)}"
                )
            weights[self.names.index(name)] = 0.0
        self.held_out = {*names}
        if names and not {*self.names} - self.held_out:
            raise ValueError("`held_out_rewards` names all reward functions, so that none is left to train on.")

    def first(self) -> "RewardFunctions":
        """Returns the first function alone, whose log entries are discarded."""
        return replace(self._select([0]), logs=dict.fromkeys(self.logs, lambda *values: None))

    def that_wait(self) -> "RewardFunctions":
        """Returns the functions that a thread may call while the policy is trained, see [`only_waits`]."""
        return self._select([i for i, function in enumerate(self.functions) if only_waits(function)])

    def warnings(self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Returns warnings about what the functions look for in completions, once the first prompts are known."""
        return [
            *missing_instructions(self.functions, self.names, prompts),
            *dropped_tags(self.functions, tokenizer),
        ]

    def _select(self, indices: list[int]) -> "RewardFunctions":
        return replace(
            self,
            names=[self.names[i] for i in indices],
            functions=[self.functions[i] for i in indices],
            processors=[self.processors[i] for i in indices],
        )

    def _checked(self, rollout: Prompted, media_rules: MediaRules) -> dict[str, Callable]:
        text_models = [
            name for name, function in zip(self.names, self.functions, strict=True) if isinstance(function, nn.Module)
        ]
        _check_text_models(text_models, rollout.source.messages, rollout.source.completions)
        spans = [[(turn.start, turn.stop) for turn in turns] for turns in rollout.source.sampled_turns]
        checked = {}
        for name, function, processor in zip(self.names, self.functions, self.processors, strict=True):
            if name in text_models:
                function = text_reward_func(function, processor, self.template_kwargs)
            elif hasattr(function, "stores_failures"):
                # Reward functions of environments store errors in this list, see `environments.reward_of`
                function = partial(function, failures=rollout.source.failures)
            checked[name] = checked_reward(function, name, media_rules, rollout.source.row_indices, spans)
        return checked


def only_waits(reward_func: Callable) -> bool:
    """
    Returns whether a thread may call a reward function while the policy is trained. The function must be async, or
    have a true attribute `only_waits`, like functions that ask servers. Other functions may use collectives, signals
    or the device.
    """
    return is_async_callable(reward_func) or getattr(reward_func, "only_waits", False)


def _arguments(rollout: Prompted) -> dict[str, Any]:
    """Returns TRL's arguments of reward functions, and `group_ids`, unless a group straddles ranks."""
    source = rollout.source
    rows = [dict(row) for row in source.rows]
    for i, row in enumerate(rows):
        # A further column of `rollout_func` is a list with one value per row, or a single value for all rows
        for name, value in source.extra.items():
            row[name] = value[i] if isinstance(value, list) else value
        if source.environments is not None:
            row["environments"] = source.environments[i]
    prompts = restore_media(source.messages)
    completions = restore_media(source.completions)
    arguments = reward_arguments(prompts, completions, source.ids, rows)
    if source.sounds is not None:
        arguments["completion_audio"] = source.sounds
    if source.whole_groups:
        arguments["group_ids"] = rollout.group_ids.tolist()
    return arguments


def _without_failed(rewards: list[float | None], rollout: Prompted) -> list[float | None]:
    return [value if error is None else None for value, error in zip(rewards, rollout.source.failures, strict=True)]


def _check_text_models(names: Collection[str], prompts: Any, completions: Any) -> None:
    """
    Raises [`MediaError`] if prompts hold media, which models of text don't read, and warns if tools returned media.
    """
    ref = next(iter_refs(prompts), None)
    if names and ref is not None:
        raise ref.error(
            f"the reward model '{next(iter(names))}' would read only the text; pass its processor in "
            f"`reward_processing_classes` if the model takes {ref.modality}, or use a reward function"
        )
    if next(iter_refs(completions), None) is None:
        return
    for name in names:
        logger.warning_once(
            f"The reward model '{name}' reads text alone and doesn't get the media that tools returned. Pass its "
            "processor in `reward_processing_classes` if the model takes these media."
        )
