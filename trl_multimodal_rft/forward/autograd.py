# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A typed context for autograd functions."""

from typing import Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx


T = TypeVar("T")


class Context(FunctionCtx, Generic[T]):
    """The context of an autograd function: tensors and settings that `forward` keeps for `backward`."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: T

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
