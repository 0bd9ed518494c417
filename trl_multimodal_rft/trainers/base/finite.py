# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of weights, gradients and logits that aren't finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from ...models.wrapped import local_part
from ...rollout.ranks import any_rank


@torch.no_grad()
def check_weights(model: nn.Module, accelerator: Accelerator, step: int, consequence: str) -> None:
    """Raises `FloatingPointError` if trained weights aren't finite. All ranks must call this."""
    trained_weights = {name: local_part(p) for name, p in model.named_parameters() if p.requires_grad}
    trained_weights = {name: value for name, value in trained_weights.items() if value.numel() > 0}
    # The largest absolute weight isn't finite if any weight isn't
    largest_weight = nn.utils.get_total_norm(trained_weights.values(), math.inf)
    if any_rank(accelerator, not largest_weight.isfinite().item()):
        examples = [f", such as {name!r}" for name, value in trained_weights.items() if not value.isfinite().all()]
        raise FloatingPointError(
            f"Weights aren't finite after step {step}{''.join(examples[:1])}, so {consequence}. "
            "Resume from an earlier checkpoint, with a lower `learning_rate` or `max_grad_norm`."
        )


@torch.no_grad()
def check_frozen_weights(model: nn.Module, label: str) -> None:
    """Raises a `ValueError` if weights of a model that isn't trained, named by `label`, aren't finite."""
    for name, parameter in model.named_parameters():
        weights = local_part(parameter)
        # Quantized weights are integers or floats of a byte, which have no `aminmax`
        if weights.is_meta or not weights.numel() or not weights.is_floating_point() or weights.element_size() == 1:
            continue
        if not all(bound.isfinite() for bound in weights.aminmax()):
            raise ValueError(f"Weights of {label} aren't finite, such as {name!r}; save or download the model again.")


def skip_broken_update(
    norm: float | torch.Tensor | None,
    optimizer: Optimizer,
    accelerator: Accelerator,
    step: int,
    n_skipped: int,
    limit: int,
) -> tuple[bool, int]:
    """
    Skips an update whose gradient isn't finite. Returns whether it does, and the number in a row. Raises
    `FloatingPointError` if that exceeds `limit`, or if DeepSpeed has made the update already.
    """
    # All ranks decide alike, because they have the same norm. DeepSpeed's norm can be `None` or -1
    if norm is None or (math.isfinite(norm) and norm >= 0):
        return False, 0
    scaler = accelerator.scaler
    if accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() > 1):
        return False, n_skipped  # the loss is scaled too much; the scaler lowers the scale and skips the step
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        if not accelerator.optimizer_step_was_skipped:
            raise FloatingPointError(
                f"DeepSpeed made step {step + 1} with a gradient that isn't finite. Resume from an earlier "
                "checkpoint with ZeRO-1, 2 or 3, which skip such steps."
            )
        wrapped: Any = optimizer
        wrapped.optimizer.overflow = False  # so that the schedule advances, as without DeepSpeed
    n_skipped += 1
    if n_skipped > limit:
        raise FloatingPointError(
            f"The gradient of {n_skipped} updates in a row isn't finite. Lower `learning_rate` or `max_grad_norm`, or "
            f"look in the logs for a change before step {step - n_skipped + 2}, the first of these updates."
        )
    optimizer.zero_grad()  # a step without gradients changes neither weights nor the optimizer
    return True, n_skipped


@contextmanager
def naming_broken_logits(step: int, dtype: torch.dtype) -> Iterator[None]:
    """Raises `FloatingPointError`, with the step and a remedy, if torch can't sample from logits in the context."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        overflow = (
            f", or activations overflow {dtype}: load the model with `model_init_kwargs={{'dtype': 'bfloat16'}}` or "
            "'float32', and set `bf16=True` instead of `fp16=True`"
        )
        raise FloatingPointError(
            f"Logits aren't finite after step {step}, so no completions can be sampled, although the trained weights "
            "are finite. First lower `learning_rate`. If this doesn't help, frozen weights aren't finite"
            f"{'' if dtype is torch.float32 else overflow}."
        ) from error
