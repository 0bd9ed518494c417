# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which attention kernels run on a GPU."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Whether device and dtype have a variable-length kernel: from Ampere on, in half precision."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scaling: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    library: bool = False,
) -> torch.Tensor:
    """
    Attention within sequences of a row, by the kernel of torch or of the flash-attn `library`.

    `window_size` is how many keys before and after its own a query attends to, -1 for all. Shapes: states
    `(T, heads, head_dim)`, starts `(sequences + 1,)`; returns `(T, heads, head_dim)`.
    """
    sequences = query_starts, key_starts, longest_query, longest_key
    scaling, size = scaling or query.size(-1) ** -0.5, value.size(-1)
    # Kernels want one size of heads, a multiple of 8; those of latent attention have 192 and 128
    width = -(-max(query.size(-1), size) // 8) * 8
    query, key, value = (
        states if states.size(-1) == width else F.pad(states, (0, width - states.size(-1)))
        for states in (query, key, value)
    )
    options: dict[str, Any]
    output: Any
    if library:
        from flash_attn import flash_attn_varlen_func

        options = {"causal": window_size[1] == 0, "window_size": window_size, "softcap": softcap or 0.0}
        output = flash_attn_varlen_func(query, key, value, *sequences, softmax_scale=scaling, **options)
    else:
        from torch.nn.attention.varlen import varlen_attn  # whose import takes longer than that of this folder

        options = {"scale": scaling, "window_size": window_size, **_gqa_option(varlen_attn)}
        output = varlen_attn(query, key, value, *sequences, **options)
    return output if size == width else output[..., :size]


@functools.cache
def _gqa_option(kernel: Callable) -> dict[str, Any]:
    """What permits fewer heads of keys than of queries, which torch before 2.13 always does."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


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
