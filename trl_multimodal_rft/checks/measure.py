# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Log-probabilities of a policy against those of the model's own forward, with decisions common to all ranks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from ..encoding.join import continued_field
from ..encoding.prompts import EncodedPrompt, prompt_position_ids
from ..families import TOKEN_FIELDS, family_of
from ..forward.attention import original_attention
from ..forward.scoring import takes_logits_to_keep, to_model
from ..models.wrapped import computing_dtype
from ..policy import PolicyForward


logger = get_logger(__name__)

_Result = TypeVar("_Result")


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest difference of log-probabilities from rounding."""
    # Scores are computed in float32 at best, even for a model in float64
    return 2 * math.sqrt(max(torch.finfo(each).eps for each in (dtype, torch.float32)))


def raise_out_of_memory(error: Exception) -> None:
    """Reraises an error that says nothing about exactness."""
    if isinstance(error, MemoryError) or should_reduce_batch_size(error):
        raise error


class Measure:
    """
    Compares a policy with the model's own forward.

    `fallbacks` start as the policy's and become those that exact scores need. `failure` is the error of the last
    attempt.
    """

    def __init__(self, policy: PolicyForward, model: nn.Module, engine_positions: bool):
        assert policy.accelerator is not None
        self.policy, self.prepared = policy, model
        self.model = policy.unwrapped(model)
        self.accelerator = policy.accelerator
        self.device = self.accelerator.device
        self.tolerance = tolerance_of(computing_dtype(self.accelerator, self.model))
        self.fallbacks = replace(policy.fallbacks)
        self.model_type = self.model.config.model_type
        self.has_engine = engine_positions
        self.failure = ""

    # The policy

    def score(
        self,
        prompts: list[EncodedPrompt],
        ids: torch.Tensor,
        mask: torch.Tensor,
        packed: bool,
        isolate: Literal["media", "prompt"] | None = None,
    ) -> torch.Tensor:
        """Log-probabilities `(P * B, N)` of the same completions `(B, N)` to each of `P` prompts."""
        fresh = [replace(prompt, mask_cache={}) for prompt in prompts]
        repeated = [prompt for prompt in fresh for _ in range(len(ids))]
        rows = [each.repeat(len(prompts), 1) for each in (ids, mask)]
        fallbacks = replace(self.fallbacks, isolate=isolate)
        return self.policy.score(self.prepared, repeated, *rows, packed=packed, fallbacks=fallbacks).logps

    # The model's own forward

    def at_engine_positions(self, prompt: EncodedPrompt) -> bool:
        """Whether an engine has a prompt at other positions than the model."""
        if not self.has_engine or not prompt.media:
            return False
        expected = prompt_position_ids(self.model, prompt.input_ids, prompt.media, prompt.token_fields)
        return not torch.equal(expected, prompt.position_ids)

    def model_inputs(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs of the model from a processor's outputs for one prompt."""
        inputs = to_model(outputs, self.model, self.device)
        return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}

    def model_logps(
        self, inputs: dict[str, torch.Tensor], prompt: EncodedPrompt, ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Log-probabilities of completions `(B, N)` by the model's own forward, one by one; `None` if it fails."""
        if self.at_engine_positions(prompt):
            positions = prompt.position_ids.to(self.device)
            following = positions[..., -1:] + 1 + torch.arange(ids.size(1), device=self.device)
            inputs = {**inputs, "position_ids": torch.cat([positions, following], dim=-1)}
        return self.attempt(
            "the model's forward", lambda: torch.cat([self._model_logps(inputs, row) for row in ids[:, None]])
        )

    def _model_logps(self, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Those of one completion `(1, N)`."""
        n_new = ids.size(1)
        whole: dict[str, Any] = {**inputs, "input_ids": torch.cat([inputs["input_ids"], ids], dim=1)}
        for name, value in (("attention_mask", 1), *((name, 0) for name in TOKEN_FIELDS if name in inputs)):
            whole[name] = nn.functional.pad(whole[name], (0, n_new), value=value)
        for name in family_of(self.model).token_masks:
            if name in inputs:
                whole[name] = continued_field(self.model, name, whole[name], n_new)
        if takes_logits_to_keep(self.model):
            whole["logits_to_keep"] = n_new + 1
        with self.accelerator.autocast(), original_attention(self.model):
            logits = self.prepared(**whole, use_cache=False).logits
        return self.logps_of(logits[:, -n_new - 1 : -1], ids)

    def logps_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(B, N)` of ids, from logits that may stop where completions end."""
        logps = (logits.float() / self.policy.temperature).log_softmax(-1)
        logps = logps.gather(-1, ids[:, : logits.size(1), None])[..., 0]
        return nn.functional.pad(logps, (0, ids.size(1) - logits.size(1)))

    # Decisions common to all ranks

    def difference(self, a: torch.Tensor | None, b: torch.Tensor, mask: torch.Tensor) -> float:
        """The largest difference over all ranks; infinite if there is nothing to compare."""
        value = math.inf
        if a is not None and a.shape == b.shape:
            value = torch.where(mask.bool(), a - b, 0.0).abs().max().item()
        return self.worst(math.inf if math.isnan(value) else value)

    def worst(self, value: float) -> float:
        """The largest value over all ranks."""
        return self.accelerator.gather(torch.tensor([value], device=self.device)).max().item()

    def attempt(self, what: str, measure: Callable[[], _Result], quiet: bool = False) -> _Result | None:
        """Warns if something fails; returns `None` on all ranks if it failed on one."""
        result = None
        try:
            result = measure()
        except Exception as error:
            raise_out_of_memory(error)
            self.failure = f"{type(error).__name__}: {error}"
            if not quiet:
                logger.warning(f"self-check: {self.model_type}: {what} failed ({self.failure}).")
        return None if self.worst(float(result is None)) else result

    def require(self, what: str, measure: Callable[[], _Result]) -> _Result:
        """Raises if something fails."""
        result = self.attempt(what, measure)
        if result is None:
            raise self.inexact(f"{what} fails ({self.failure})")
        return result

    def warn(self, found: str, fallback: str) -> None:
        """Logs why a fallback is used from here on."""
        logger.warning(f"self-check: {self.model_type}: {found}; falling back to {fallback}.")

    def inexact(self, reason: str) -> RuntimeError:
        """The error where no fallback is exact."""
        return RuntimeError(
            f"self-check: {self.model_type} can't be trained exactly: {reason}. To train anyway, set "
            "`self_check=False`."
        )
