# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models with 4-bit weights."""

from torch import nn


def keep_differentiable(model: nn.Module) -> None:
    """
    Keeps 4-bit weights in the layout that has a gradient. On CPUs with AVX512-BF16, bitsandbytes packs them at the
    first forward in evaluation mode, and never unpacks them; packed layers pass no gradient, without an error.
    """
    for module in model.modules():
        if _is_4bit_layer(module):
            module.support_avx512bf16_for_cpu = False  # pyrefly: ignore[bad-argument-type]


def is_4bit(model: nn.Module) -> bool:
    """Returns whether a model has 4-bit weights."""
    return any(map(_is_4bit_layer, model.modules()))


def _is_4bit_layer(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear4bit"
