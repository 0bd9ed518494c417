# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On-policy distillation, part by part."""

import torch

from ..shared.method import Method


def mean_divergence(divergences: torch.Tensor, n_tokens: torch.Tensor) -> torch.Tensor:
    """Returns a micro-batch's part of the mean over `n_tokens` of an update. A divergence outside the mask is 0."""
    return divergences.sum() / n_tokens


# See [On-Policy Distillation of Language Models](https://huggingface.co/papers/2306.13649). The divergence is
# [`~forward.divergence.divergences`], whose `beta` is 0 for the forward KL, and 1 for the reverse KL
DISTILLATION = Method(
    name="distillation",
    loss=mean_divergence,
    defaults={"num_generations": 1, "beta": 1.0, "loss_top_k": 0, "loss_add_tail": True, "self_teacher": "current"},
)
