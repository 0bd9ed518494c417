# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training on the tokens whose entropy is highest, see [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939)."""

from typing import Any

import torch

from ..algorithms.entropy import high_entropy_weights
from ..models.trainer_mixin import TrainerMixin


class TokenFilterMixin(TrainerMixin):
    """Gives GRPO the choice of where the entropies come from, and among which tokens the highest are chosen."""

    _gather_rows: Any
    _loss_mask: Any
    _score_rollout: Any

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        args = self.args
        if not self.model.training or args.top_entropy_quantile == 1:
            return inputs
        window = {"batch": args.gradient_accumulation_steps, "micro_batch": 1}.get(args.entropy_scope)
        if args.entropy_source == "rollout" and self._buffered_inputs is not before:
            window = window or len(self._buffered_inputs)  # sequences don't compete, so any will do
            for start in range(0, len(self._buffered_inputs), window):
                batches = self._buffered_inputs[start : start + window]
                self._mark_tokens(batches, [batch.pop("rollout_entropies") for batch in batches])
        elif args.entropy_source == "current" and args.entropy_scope == "batch" and self._step % window == 0:
            start = self._step % args.steps_per_generation
            batches = self._buffered_inputs[start : start + window]
            self._mark_tokens(
                batches, [self._score_rollout(self.model, batch, extra=True).entropies for batch in batches]
            )
        return inputs

    def _mark_tokens(self, batches: list[dict[str, Any]], entropies: list[torch.Tensor]) -> None:
        """Chooses tokens among micro-batches of all processes."""
        mask = torch.cat([self._loss_mask(batch) for batch in batches])
        weights = self._high_entropy_weights(torch.cat(entropies), mask)
        for batch, part in zip(batches, weights.chunk(len(batches)), strict=True):
            batch["high_entropy_weights"] = part

    def _high_entropy_weights(self, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        args = self.args
        return high_entropy_weights(
            entropies,
            mask,
            args.top_entropy_quantile,
            scope=args.entropy_scope,
            renormalize=args.entropy_renormalize,
            gather=self._gather_rows,
            rank=self.accelerator.process_index,
        )

    def _token_weights(
        self, inputs: dict[str, Any], entropies: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor | float:
        """Weights of the tokens in the policy loss, `(B, C)`, or 1."""
        args = self.args
        if "high_entropy_weights" in inputs:
            return inputs["high_entropy_weights"]
        if args.top_entropy_quantile == 1:
            return 1.0
        if args.entropy_scope == "micro_batch" and args.entropy_source == "current" and not args.entropy_renormalize:
            return self.get_high_entropy_mask(entropies, mask, 1 - args.top_entropy_quantile)
        return self._high_entropy_weights(entropies, mask)
