# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions that call tools, in training."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from accelerate.logging import get_logger
from torch import nn

from ..encoding.prompts import EncodedPrompt
from ..generation.transformers import Branches
from ..rollout.ranks import sum_over_ranks
from ..rollout.rollout import Rollout
from ..rollout.samplers import Sampler
from ..rollout.turns import ToolLoop, first_turns, take_turns, turn_metrics
from .run import Run


logger = get_logger(__name__)


@dataclass
class ToolTurns:
    """Calls tools and samples further turns, until no completion ends with a call."""

    run: Run
    mode: str | None = None  # how generation continues, as it was logged last

    def __call__(
        self,
        sampler: Sampler,
        model: nn.Module,
        rollout: Rollout,
        ids: list[list[int]],
        logps: list[list[float | None]] | None,
        branches: Branches,
        make_loop: Callable[..., ToolLoop],
    ) -> tuple[list[list[int]], list[list[float | None]] | None, list[list[int]]]:
        """Ids, log-probabilities, and masks that are 0 on results. All ranks must call this."""
        run = self.run

        def sample(prompts: list[EncodedPrompt], asked: list[tuple[int, EncodedPrompt]], room: list[int]):
            branches.asked = asked
            return sampler(model, prompts, step=run.step, room=room, branches=branches)

        tools = [run.toolbox.tools_in(each) for each in rollout.environments or [None] * len(rollout)]
        first = first_turns(rollout, ids, run.prompts.processor, run.toolbox)
        ids, logps, mask, counts = take_turns(rollout, ids, logps, first, make_loop(tools, complete=sample))
        if sampler.samples_policy and counts["turns_taken"]:
            why = branches.obstacle
            mode = f"prefills the conversation again: {why}" if why else "continues from its cache"
            if mode != self.mode:
                logger.info(f"After results of tools, generation {mode}.")
                self.mode = mode
        if run.is_training:
            run.checks.on_tool_media(run.model(), rollout.prompts, ids, sampler.is_engine)
        run.metrics.add(turn_metrics(counts, len(ids), functools.partial(sum_over_ranks, run.accelerator)))
        return ids, logps, mask
