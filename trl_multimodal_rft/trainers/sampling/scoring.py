# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stage of a rollout that scores completions under the policy and its reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ...checks.run_checks import Checks
from ...forward.scores import Scores
from ...models.parts import kept_requires_grad
from ...policy import PolicyForward
from ...rollout.rollout import Rollout
from ...rollout.score import score_in_batches
from ..base.finite import check_weights
from .context import Context


@dataclass
class Scoring:
    """Stage that scores completions under the policy and its reference, and checks these scores."""

    context: Context
    policy: PolicyForward
    checks: Checks
    checked_step: int | None = None  # step at which the weights were last checked before sampling

    def check_weights(self) -> None:
        """Raises an error before sampling if weights aren't finite. Checks only once per update, on all ranks."""
        context = self.context
        if self.checked_step != context.step:
            check_weights(context.model, context.accelerator, context.step, "no completions can be sampled")
            self.checked_step = context.step

    @torch.no_grad()
    def score(self, model: nn.Module, rollout: Rollout) -> Scores:
        """Returns scores of a rollout, or of a part of it, without gradients."""
        policy: Any = self.context.model
        with disable_gradient_checkpointing(policy, self.context.args.gradient_checkpointing_kwargs):
            return score_in_batches(self.policy, model, rollout, self.context.batch_size)

    def by_reference(self, rollout: Rollout) -> Scores:
        """
        Returns a rollout's scores under the reference: a separate model, or else the policy with the adapter `ref`
        or without an adapter.
        """
        context = self.context
        if context.live.ref_model is not None:
            return self.score(context.live.ref_model, rollout)
        model: Any = context.accelerator.unwrap_model(context.model)
        with kept_requires_grad(model), use_adapter(model, "ref" if "ref" in model.peft_config else None):
            return self.score(context.model, rollout)
