# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The stages of a rollout, for what reads several of them, and the micro-batches of a rollout."""

from dataclasses import dataclass, replace

from torch import randperm

from ...models.wrapped import is_unsharded
from ...rollout.ranks import arrange_rollout, rank_metrics
from ...rollout.rollout import Rollout
from ...rollout.skipped_forwards import packing_metrics
from .context import Context
from .prompting import Prompting
from .rewarding import Rewarding
from .sampling import Sampling
from .scoring import Scoring


@dataclass(frozen=True)
class Stages:
    """Stages of a rollout, in their order."""

    context: Context
    prompting: Prompting
    sampling: Sampling
    scoring: Scoring
    rewarding: Rewarding

    def micro_batches(self, rollout: Rollout, shuffles: bool) -> list[Rollout]:
        """
        Returns the micro-batches of a rollout. With `shuffles`, completions are shuffled as in TRL. Otherwise,
        micro-batches have whole groups, and about equal packed lengths.
        """
        context, policy = self.context, self.scoring.policy
        if shuffles:
            rollout = rollout.select(randperm(len(rollout)).tolist())
        else:
            # With separate forwards of prompts (`isolate`), ranks with sharded weights need micro-batches of the same
            # modalities, so each rank keeps its groups
            may_move_groups = policy.fallbacks.isolate is None or is_unsharded(context.accelerator)
            rollout, metrics = arrange_rollout(rollout, context.args, context.accelerator, may_move_groups)
            context.metrics.add(metrics)
        micro_batches = rollout.micro_batches(context.args.steps_per_generation)
        context.metrics.add(rank_metrics(micro_batches, context.accelerator))
        context.metrics.add(packing_metrics(policy, self.prompting.encoder.model, micro_batches))
        return micro_batches

    def restored(self, micro_batches: list[Rollout]) -> list[Rollout]:
        """Returns the micro-batches of a checkpoint on this rank's device."""
        parts = [part.to(self.context.accelerator.device) for part in micro_batches]
        # This run may have fallen back to padded rows
        return [replace(part, packed=part.packed and self.scoring.policy.fallbacks.packing) for part in parts]
