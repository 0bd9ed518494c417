# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which attention kernels run on a GPU."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict, cast

import torch
import torch.nn.functional as F

from .layout import Sequences


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of transformers' attention functions that change what they compute."""

    dropout: float
    scaling: float | None
    softcap: float | None
    position_bias: torch.Tensor | None
    s_aux: torch.Tensor | None  # attention sinks


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Whether device and dtype have a variable-length kernel: from Ampere on, in half precision."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    sequences: Sequences,
    scaling: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    library: bool = False,
) -> torch.Tensor:
    """
    Attention within sequences of a row, by the kernel of torch or of the flash-attn `library`.

    `window_size` is how many keys before and after its own a query attends to, -1 for all. Shapes: states
    `(T, heads, head_dim)`; returns `(T, heads, head_dim)`.
    """
    scaling, size = scaling or query.size(-1) ** -0.5, value.size(-1)
    # Kernels want heads of one size, a multiple of 8, while those of latent attention have 192 and 128
    width = -(-max(query.size(-1), size) // 8) * 8
    if {query.size(-1), size} != {width}:
        query, key, value = (F.pad(each, (0, width - each.size(-1))) for each in (query, key, value))
    if library:
        from flash_attn import flash_attn_varlen_func

        options = {"causal": window_size[1] == 0, "window_size": window_size, "softcap": softcap or 0.0}
        output = flash_attn_varlen_func(query, key, value, *sequences, softmax_scale=scaling, **options)
    else:
        from torch.nn.attention.varlen import varlen_attn  # whose import takes longer than that of this folder

        # Before 2.13, torch always permits fewer heads of keys than of queries
        gqa = {"enable_gqa": True} if "enable_gqa" in _parameters(varlen_attn) else {}
        kernel = cast(Callable[..., torch.Tensor], varlen_attn)
        output = kernel(query, key, value, *sequences, scale=scaling, window_size=window_size, **gqa)
    return output if output.size(-1) == size else output[..., :size]


@functools.cache
def _parameters(kernel: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """
    Within the context, attention runs on other kernels than cuDNN's, which prepares each shape anew: for 0.02 to 1 s,
    and prompts and completions have ever other shapes.
    """
    if torch.compiler.is_compiling():  # which would break the graph here
        yield
        return
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
