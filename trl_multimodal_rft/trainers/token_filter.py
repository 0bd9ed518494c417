# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training on the tokens whose entropy is highest, see [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939)."""

from typing import Any

import torch

from ..algorithms.entropy import high_entropy_mask
from ..models.trainer_mixin import TrainerMixin


class TokenFilterMixin(TrainerMixin):
    """Gives GRPO the choice of where the entropies come from, and among which tokens the highest are chosen."""

    _batch: Any
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
        options = {"ratio": args.top_entropy_quantile, "renormalize": args.entropy_renormalize}
        if args.entropy_scope == "sequence":
            return high_entropy_mask(entropies, mask, scope="sequence", **options)
        weights = high_entropy_mask(self._gather_rows(entropies.detach()), self._gather_rows(mask), **options)
        start = self.accelerator.process_index * len(mask)
        return weights[start : start + len(mask), : mask.size(1)]

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """
        Tokens whose entropy is in the top quantile. In the policy loss, they are chosen and weighted as the arguments
        `entropy_*` say.

        Args:
            entropies (`torch.Tensor`):
                Entropy at each token, shape `(B, C)`.
            mask (`torch.Tensor`):
                1 on the tokens that count, shape `(B, C)`.
            threshold (`float`):
                The quantile. In the loss, 1 minus `top_entropy_quantile`.

        Returns:
            `torch.Tensor`: TRL's mask, `True` on those tokens. In the loss the weights, 0 on tokens that aren't
            trained on. Shape `(B, C)`.
        """
        batch = vars(self).get("_batch")  # an instance without a constructor or a mock has none
        if batch is None or batch.token_weights is None:  # not asked for the loss of a micro-batch
            return super().get_high_entropy_mask(entropies, mask, threshold)
        return batch.token_weights

    def _token_weights(
        self, inputs: dict[str, Any], entropies: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor | None:
        """Weights of the tokens in the policy loss, `(B, C)`; `None` for 1."""
        args = self.args
        if "high_entropy_weights" in inputs:
            return inputs["high_entropy_weights"]
        if args.top_entropy_quantile == 1:
            return None
        if args.entropy_scope == "micro_batch" and args.entropy_source == "current" and not args.entropy_renormalize:
            return super().get_high_entropy_mask(entropies, mask, 1 - args.top_entropy_quantile)
        return self._high_entropy_weights(entropies, mask)
