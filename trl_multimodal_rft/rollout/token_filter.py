# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training on the tokens with the highest entropy, see [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..algorithms.entropy import high_entropy_mask
from .rollout import Rollout


@dataclass(frozen=True)
class EntropySource:
    """Settings of the option `entropy_source`."""

    policy: Literal["rollout", "current"] = "rollout"  # policy whose entropies choose tokens
    scope: Literal["batch", "sequence", "micro_batch"] = "batch"  # tokens that compete for the highest entropies
    renormalize: bool = False  # whether the policy loss is averaged over the tokens that are trained on
    rounding: Literal["up", "down"] = "up"  # of the number of tokens to train on, which is at least 1


@dataclass(frozen=True)
class TokenFilter:
    """
    Choice of the tokens to train on by the arguments `top_entropy_quantile` and `entropy_source`. Which of GRPO's
    methods sets the weights of tokens, for micro-batches before and after the first update on a rollout:

    | policy | scope | before | after |
    |---|---|---|---|
    | rollout | sequence, micro_batch | `_token_weights`, in the forward | `_on_rollout` |
    | rollout | batch | `_on_rollout` | `_on_rollout` |
    | current | sequence, micro_batch | `_token_weights`, in each forward | `_token_weights` |
    | current | batch | `_on_micro_batch` | `_on_micro_batch` |
    """

    args: Any
    gather: Callable[[torch.Tensor], torch.Tensor]  # returns the rows of all ranks, padded on the right
    rank: int

    @property
    def is_on(self) -> bool:
        """`True` if some tokens are left out."""
        return self.args.top_entropy_quantile < 1

    @property
    def is_as_in_trl(self) -> bool:
        """`True` if tokens are chosen as in TRL."""
        return self.args.entropy_settings == EntropySource("current", "micro_batch")

    @property
    def window(self) -> int | None:
        """Number of micro-batches whose tokens compete; `None` if tokens compete within each sequence."""
        return {"batch": self.args.gradient_accumulation_steps, "micro_batch": 1}.get(self.args.entropy_settings.scope)

    def weights(self, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Returns the weights of tokens in the policy loss. Shapes: all `(B, C)`, for `B` completions of this rank with
        `C` columns of tokens.
        """
        args = self.args
        settings = self.args.entropy_settings
        options = {"ratio": args.top_entropy_quantile, "renormalize": settings.renormalize}
        options |= {"rounding": settings.rounding}
        if settings.scope == "sequence":
            return high_entropy_mask(entropies, mask, scope="sequence", **options)
        weights = high_entropy_mask(self.gather(entropies.detach()), self.gather(mask), **options)
        # This rank's rows, without columns of padding by `gather`
        return weights[self.rank * len(mask) : (self.rank + 1) * len(mask), : mask.size(1)]

    def set_weights(self, micro_batches: Sequence[Rollout], entropies: Sequence[torch.Tensor]) -> None:
        """
        Sets the weights of micro-batches' tokens by their entropies, `(B, C)`. Tokens also compete with the tokens of
        other ranks, unless the scope is the sequence.
        """
        weights = self.weights(
            torch.cat([*entropies]), torch.cat([micro_batch.loss_mask for micro_batch in micro_batches])
        )
        for micro_batch, batch_weights in zip(micro_batches, weights.chunk(len(micro_batches)), strict=True):
            self.keep(micro_batch, batch_weights)

    def keep(self, micro_batch: Rollout, weights: torch.Tensor) -> None:
        """Sets the weights of a micro-batch's tokens, `(B, C)`. Nothing else sets them after it was made."""
        micro_batch.tokens.weights = weights
