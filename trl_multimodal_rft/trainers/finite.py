# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Weights and logits that aren't finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

from ..rollout.ranks import any_rank
from .checkpoint_files import local_part


@torch.no_grad()
def check_weights(model: nn.Module, accelerator: Accelerator, step: int, consequence: str) -> None:
    """Raises if trained weights aren't finite. All processes have to call this."""
    trained = {name: local_part(p) for name, p in model.named_parameters() if p.requires_grad}
    trained = {name: value for name, value in trained.items() if value.numel() > 0}
    # The largest weight isn't finite if one isn't
    largest = nn.utils.get_total_norm(trained.values(), math.inf)
    if any_rank(accelerator, not largest.isfinite().item()):
        broken = [f", such as {name!r}" for name, value in trained.items() if not value.isfinite().all()]
        raise FloatingPointError(
            f"Weights aren't finite after step {step}{''.join(broken[:1])}, so {consequence}. "
            "Resume from an earlier checkpoint, with a lower `learning_rate` or `max_grad_norm`."
        )


@contextmanager
def naming_broken_logits(step: int, dtype: torch.dtype) -> Iterator[None]:
    """Names the step and the remedy where torch can't sample from logits."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise FloatingPointError(
            f"Logits aren't finite after step {step}, so no completions can be sampled, although the trained weights "
            f"are finite. Frozen weights aren't, or activations overflow {dtype}: load the model with "
            "`model_init_kwargs={'dtype': 'bfloat16'}` or 'float32', and set `bf16=True` instead of `fp16=True`."
        ) from error
