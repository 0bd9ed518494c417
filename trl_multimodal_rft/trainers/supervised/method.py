# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supervised fine-tuning (SFT), part by part."""

from typing import Literal

import torch

from ..shared.method import Method


def token_losses(logps: torch.Tensor, loss_type: Literal["nll", "dft"]) -> torch.Tensor:
    """Returns the negative log-likelihood of each token, with `"dft"` times its probability. Shapes: both `(B, T)`."""
    return -logps * logps.exp().detach() if loss_type == "dft" else -logps


# The mean over the learned tokens of an update
SFT = Method(name="sft", loss=token_losses, defaults={"loss_type": "nll"})
