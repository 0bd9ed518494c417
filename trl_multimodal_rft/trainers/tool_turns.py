# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions that call tools, in training."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate.logging import get_logger
from torch import nn

from ..encoding.prompts import EncodedPrompt
from ..generation.transformers import Branches
from ..rollout.ranks import sum_over_ranks
from ..rollout.rollout import Rollout, known
from ..rollout.samplers import Sampler
from ..rollout.turns import ENDS, ToolLoop, first_turns, run_turns, with_results
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

        tools = [run.toolbox.tools_in(each) for each in rollout.source.environments or [None] * len(rollout)]
        first = first_turns(rollout, ids, run.prompts.processor, run.toolbox)
        loop = make_loop(tools, complete=sample)
        trajectories = run_turns(rollout, ids, logps, first, loop)
        for each in trajectories:
            each.prompt.decoded = ()  # the engine has processed the last turn
        rollout.prompts = with_results(loop.model, trajectories)
        rollout.source.completions = [each.messages for each in trajectories]
        ids, mask = [each.ids for each in trajectories], [each.mask for each in trajectories]
        logps = None if logps is None else [each.logps or [] for each in trajectories]
        if sampler.samples_policy and any(each.turns for each in trajectories):
            why = branches.obstacle
            mode = f"prefills the conversation again: {why}" if why else "continues from its cache"
            if mode != self.mode:
                logger.info(f"After results of tools, generation {mode}.")
                self.mode = mode
        if (flight := rollout.source.flight) is not None:  # results are followed by the newest weights
            called = torch.tensor([0 in each for each in mask], device=run.accelerator.device)
            flight.versions[called, 1] = known(rollout.source.batch_index)
        if run.is_training:
            run.checks.on_tool_media(run.model(), rollout.prompts, ids, sampler.is_engine)
        counts = sum((each.counts for each in trajectories), Counter())
        counted = [*(counts[name] for name in (*ENDS, "calls", "failures")), len(ids)]
        *ended, calls, failures, n = sum_over_ranks(run.accelerator, counted)
        run.metrics.add({f"tools/ended_by_{name}": count / n for name, count in zip(ENDS, ended, strict=True)})
        failed = failures / calls if calls else 0.0
        run.metrics.add({"tools/call_frequency": calls / n, "tools/failure_frequency": failed})
        return ids, logps, mask
