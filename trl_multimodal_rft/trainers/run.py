# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the stages of a rollout share."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerState

from ..checks.run_checks import Checks
from ..data.reading.rules import MediaRules
from ..policy import PolicyForward
from ..rewards.checks import missing_instructions
from ..rollout.collect import collect
from ..rollout.environments import Environments
from ..rollout.prompt_encoder import PromptEncoder
from ..rollout.ranks import any_rank
from ..rollout.reward import checked_functions, reward_rollout
from ..rollout.rollout import Rollout
from ..rollout.samplers import Sampler
from ..rollout.stream import EncodedRow, RowStream
from ..rollout.turns import ToolLoop


logger = get_logger(__name__)


@dataclass
class MetricLog:
    """Metrics since the last log, of training and of evaluation."""

    by_mode: Mapping[str, dict[str, list[float]]]  # TRL's
    is_training: Callable[[], bool]

    @property
    def now(self) -> dict[str, list[float]]:
        """Those of the mode that the model is in."""
        return self.by_mode["train" if self.is_training() else "eval"]

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.now[name].append(value)


@dataclass
class Rewarding:
    """Calls the reward functions of a run."""

    functions: Callable[[], tuple[list[str], list[Any], list[Any]]]  # names, functions, and processors of models
    template_kwargs: dict[str, Any]
    media_rules: MediaRules
    state: Callable[[], TrainerState]
    logs: dict[str, Callable[..., None] | None]  # arguments of functions that they log with
    loop: Any  # of asynchronous functions
    profile: Callable[[str], AbstractContextManager]
    was_called: bool = False

    def __call__(self, rollout: Rollout, *, only_first: bool = False, logs: bool = True) -> torch.Tensor:
        """Rewards of this rank's completions, `(N, functions)`; by the first function alone if so wished."""
        flight = rollout.source.flight
        early = None if flight is None or only_first else flight.early_rewards
        names, functions, processors = self.functions()
        if not self.was_called:
            self.was_called = True
            for warning in missing_instructions(functions, names, rollout.source.messages):
                logger.warning(warning)
        n = 1 if only_first else None
        checked = checked_functions(
            rollout, names[:n], functions[:n], processors[:n], self.template_kwargs, self.media_rules
        )
        given = self.logs if logs else dict.fromkeys(self.logs, lambda *values: None)
        return reward_rollout(
            rollout, checked, {"trainer_state": self.state(), **given}, self.loop, self.profile, early
        )

    @property
    def names(self) -> list[str]:
        return self.functions()[0]


@dataclass
class Run:
    """What the stages of a rollout share: the settings of a run, its parts, and how far it is."""

    args: Any  # the config of the trainer
    accelerator: Accelerator
    policy: PolicyForward
    prompts: PromptEncoder
    toolbox: Environments
    stream: RowStream
    checks: Checks
    metrics: MetricLog
    rewarding: Rewarding
    model: Callable[[], nn.Module]  # the policy, as prepared for training
    state: Callable[[], TrainerState]
    group_sizes: tuple[int, int]  # completions of a prompt, in training and in evaluation
    encodes_text: bool = True  # else a function of the user tokenizes prompts of text

    def collect(self, rows: Sequence[EncodedRow]) -> Rollout:
        """A rollout of rows, one per completion, with their environments and encoded prompts."""
        tokenizer = getattr(self.prompts.processor, "tokenizer", self.prompts.processor)
        return collect(
            rows,
            self.prompts,
            self.toolbox,
            encodes_text=self.encodes_text,
            group_size=self.group_size,
            pad_token_id=tokenizer.pad_token_id,
            accelerator=self.accelerator,
        )

    @property
    def step(self) -> int:
        return self.state().global_step

    @property
    def is_training(self) -> bool:
        """Whether rows are those of training."""
        return self.model().training

    @property
    def group_size(self) -> int:
        return self.group_sizes[not self.is_training]

    def tool_loop(
        self,
        sampler: Sampler,
        tools: Sequence[dict[str, Callable]],
        template_kwargs: dict[str, Any],
        **options: Any,
    ) -> ToolLoop:
        """Calls each completion's tools, with further fields of the loop."""
        args = self.args
        anyone = functools.partial(any_rank, self.accelerator) if sampler.is_collective else bool
        options = {"max_media": args.max_tool_media, "media_rules": args.rules, "anyone": anyone, **options}
        return ToolLoop(
            model=self.prompts.model,
            processor=self.prompts.processor,
            tools=tools,
            template_kwargs=template_kwargs,
            audio_overlong=args.audio_overlong,
            special_tokens_in_text=args.special_tokens_in_text or "raise",
            isolate=self.policy.fallbacks.isolate,
            engine_length=sampler.max_length,
            **options,
        )
