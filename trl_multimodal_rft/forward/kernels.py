# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention kernels of torch and of flash-attn, by device and dtype."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict, cast

import torch
import torch.nn.functional as F

from .autograd import Context
from .layout import Sequences


_signature = functools.cache(inspect.signature)


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of transformers' attention functions that change what they compute."""

    dropout: float
    scaling: float | None
    softcap: float | None
    position_bias: torch.Tensor | None
    s_aux: torch.Tensor | None  # attention sinks


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Returns whether a variable-length kernel supports device and dtype: GPUs from Ampere on, in half precision."""
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
    uses_library: bool = False,
) -> torch.Tensor:
    """
    Computes attention within sequences of a row, by torch's kernel, or flash-attn if `uses_library`. `window_size`
    counts keys before and after a query, -1 for all: `(-1, 0)` is causal. Query `(Q, heads, head_dim)`, key and value
    `(K, key heads, head_dim)`.
    """
    scaling = scaling or query.size(-1) ** -0.5
    head_dim = value.size(-1)
    query, key, value = _pad_heads(query, key, value)
    if uses_library:
        from flash_attn import flash_attn_varlen_func

        options = {"causal": window_size[1] == 0, "window_size": window_size, "softcap": softcap or 0.0}
        output = flash_attn_varlen_func(query, key, value, *sequences, softmax_scale=scaling, **options)
    else:
        from torch.nn.attention.varlen import varlen_attn  # the import is slow

        # Before 2.13, torch always permits grouped-query attention
        gqa_options = {"enable_gqa": True} if "enable_gqa" in _signature(varlen_attn).parameters else {}
        kernel = cast(Callable[..., torch.Tensor], varlen_attn)
        output = kernel(query, key, value, *sequences, scale=scaling, window_size=window_size, **gqa_options)
    return output if output.size(-1) == head_dim else output[..., :head_dim]


def _pad_heads(*states: torch.Tensor) -> list[torch.Tensor]:
    """
    Pads heads to one size, a multiple of 8, as kernels require. In latent attention, queries and keys have heads of
    size 192, and values have heads of size 128, which are padded.
    """
    width = -(-max(tensor.size(-1) for tensor in states) // 8) * 8
    return [tensor if tensor.size(-1) == width else F.pad(tensor, (0, width - tensor.size(-1))) for tensor in states]


def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared_key: torch.Tensor,
    shared_value: torch.Tensor,
    *,
    index: torch.Tensor | None,
    sequences: Sequences,
    shared_sequences: Sequences,
    scaling: float | None = None,
) -> torch.Tensor:
    """
    Computes causal attention within `sequences` of a row; the `R` queries at `index` (`None`: all) attend to all keys
    of a shared sequence, too, merged by log-sum-exp as in [Ring Attention](https://huggingface.co/papers/2310.01889).
    Shapes as in [`varlen_attention`].
    """
    scaling = scaling or query.size(-1) ** -0.5
    head_dim = value.size(-1)
    states = _pad_heads(query, key, value, shared_key, shared_value)
    return _MergedAttention.apply(*states, index, sequences, shared_sequences, scaling)[..., :head_dim]


class _MergedAttention(torch.autograd.Function):
    """Autograd function of [`merged_attention`], since `varlen_attn` has no gradient through its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Sequences, Sequences, float]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        shared_key: torch.Tensor,
        shared_value: torch.Tensor,
        index: torch.Tensor | None,
        sequences: Sequences,
        shared_sequences: Sequences,
        scaling: float,
    ) -> torch.Tensor:
        output, lse = flash_forward(query, key, value, sequences, True, scaling)
        shared_output, shared_lse = flash_forward(
            rows_at(query, index), shared_key, shared_value, shared_sequences, False, scaling
        )
        causal_output = rows_at(output, index)
        total_lse = torch.logaddexp(rows_at(lse.T, index).T, shared_lse)
        # Weight of shared keys in the softmax, `(R, heads, 1)`
        weight = (shared_lse - total_lse).exp().T[..., None]
        merged = torch.lerp(causal_output.to(weight.dtype), shared_output.to(weight.dtype), weight).to(output.dtype)
        if index is None:
            output = merged
            lse = total_lse
        else:
            output = output.index_copy(0, index, merged)
            lse = lse.index_copy(1, index, total_lse)
        ctx.save_for_backward(query, key, value, shared_key, shared_value, index, output, lse)
        ctx.settings = sequences, shared_sequences, scaling
        return output

    @staticmethod
    def backward(
        ctx: Context[tuple[Sequences, Sequences, float]], gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, shared_key, shared_value, index, output, lse = ctx.saved_tensors
        sequences, shared_sequences, scaling = ctx.settings
        # With the merged output and log-sum-exp, the kernel computes the gradient through the keys of one call. The
        # queries at `index` get the sum of both gradients.
        query_gradient, *gradients = flash_backward(gradient, query, key, value, output, lse, sequences, True, scaling)
        gradient, query, output = (rows_at(tensor, index) for tensor in (gradient, query, output))
        lse = rows_at(lse.T, index).T.contiguous()
        shared_query_gradient, *shared_gradients = flash_backward(
            gradient, query, shared_key, shared_value, output, lse, shared_sequences, False, scaling
        )
        query_gradient = (
            query_gradient + shared_query_gradient
            if index is None
            else query_gradient.index_add(0, index, shared_query_gradient)
        )
        return query_gradient, *gradients, *shared_gradients, None, None, None, None


def rows_at(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Returns values at an index along the first dimension, or all values if the index is `None`."""
    return values if index is None else values.index_select(0, index)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output of torch's kernel, and the log-sum-exp of the scores by head and query, `(heads, Q)`."""
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, *sequences, 0.0, is_causal, False, scale=scaling)[:2]


def flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradients of queries, keys and values. `output` and `lse` may also include attention to other keys."""
    # The kernel takes a random state, although dropout is 0
    random_state = query.new_zeros(2, dtype=torch.uint64), query.new_zeros(0)
    backward = torch.ops.aten._flash_attention_backward
    return backward(gradient, query, key, value, output, lse, *sequences, 0.0, is_causal, *random_state, scale=scaling)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """
    Disables cuDNN's attention kernels within the context. cuDNN needs 0.02 to 1 s to prepare each new shape, and most
    batches of prompts and completions have a new shape.
    """
    if torch.compiler.is_compiling():  # a change of the setting would break the graph
        yield
        return
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    visible_key: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes attention `(B, heads, Q, head_dim)`, and the log-sum-exp of the scores `(B, heads, Q)`: the score of the
    key `visible_key`, which the additive `mask` must not mask, minus its log-probability.
    """
    if softcap is None and query.size(-1) == value.size(-1) <= 256:
        if query.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
        if mask is None and query.size(-1) % 8 == 0 and has_varlen_kernel(query):
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
            return kernel(query, key, value, 0.0, False, scale=scaling)[:2]
    folded = query.reshape(len(key), key.size(1), -1, query.size(-1))  # joins query heads that share a key
    scores = folded @ key.mT
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    if softcap is not None:
        scores = softcap * torch.tanh(scores.to(wide_dtype) * (scaling / softcap))
        scaling = 1.0
    scores = scores.to(wide_dtype) * scaling if mask is None else torch.add(mask, scores, alpha=scaling)
    logps = scores.log_softmax(-1)
    lse = scores[..., visible_key] - logps[..., visible_key]  # in fewer operations than `logsumexp`
    return (logps.exp().to(value.dtype) @ value).view(*query.shape[:3], -1), lse.view(query.shape[:3])
