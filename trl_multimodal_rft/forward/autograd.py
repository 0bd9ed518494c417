# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The type of what functions with a gradient of their own keep for it."""

from typing import Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx


T = TypeVar("T")


class Context(FunctionCtx, Generic[T]):
    """The context that torch hands to `forward` and `backward` of a function: tensors, and other settings."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: T

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
