# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention over a packed row: each prompt once, then its branches, which attend to the prompt and themselves."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..families import family_of
from .layout import PrefixLayout
from .states import install_prefix_states


_PREFIX = "prefix_shared_"

# Implementations that are wrapped under the same name
_WRAPPED: set[str] = set()


def install_prefix_attention(model: PreTrainedModel) -> None:
    """
    Makes the text decoder of a model able to run packed rows.

    Its attention function, and layers that carry a state ([`~forward.states.install_prefix_states`]), take a
    [`PrefixLayout`] from the keyword arguments of the forward; without one they compute what they did. Encoders of
    images and audio aren't changed.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
    """
    install_prefix_states(model)
    decoder = model.get_decoder()
    base = decoder.config._attn_implementation
    if base.startswith(_PREFIX) or base in _WRAPPED:
        return
    original = None if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]

    def attention(module, query, key, value, attention_mask, prefix_layout=None, token_places=None, **kwargs):
        base_attention = original or _eager_attention(module)
        if token_places is not None:
            query = _rescaled(module, query, token_places)
        if prefix_layout is None:
            return base_attention(module, query, key, value, attention_mask, **kwargs)
        return _prefix_attention(base_attention, base, module, query, key, value, prefix_layout, **kwargs)

    if "flash" in base:  # transformers loads these kernels by their name, so it must stay
        AttentionInterface.register(base, attention)
        _WRAPPED.add(base)
        return
    name = _PREFIX + base
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    decoder.set_attn_implementation(name)


def attention_obstacle(model: PreTrainedModel) -> str | None:
    """Why a text decoder's attention implementation ignores a part of the model; `None` if it doesn't."""
    decoder = model.get_decoder()
    implementation = (decoder.config._attn_implementation or "").removeprefix(_PREFIX)
    has_sinks = any(getattr(module, "sinks", None) is not None for module in decoder.modules())
    if has_sinks and implementation in ("sdpa", "flash_attention_2"):
        return (
            f"{type(decoder).__name__} has attention sinks, which {implementation} ignores; load the model with "
            "`attn_implementation='eager'`"
        )
    return None


@contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Restores the attention implementation from before [`install_prefix_attention`] within the context."""
    config = model.get_decoder().config
    name = config._attn_implementation
    config._attn_implementation = name.removeprefix(_PREFIX)
    try:
        yield
    finally:
        config._attn_implementation = name


def _eager_attention(module) -> Callable:
    """The eager attention of the module's modeling file."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _prefix_attention(base_attention, base, module, query, key, value, layout: PrefixLayout, **kwargs):
    """
    Attention of a packed row. Shapes: query, key, value `(1, heads, T, head_dim)`; returns `(1, T, heads, head_dim)`.
    """
    layers = layout.blocks[0].linear[0]
    kind = None if None in layers else module.config.layer_types[module.layer_idx]
    if kwargs.get("s_aux") is not None:  # attention sinks, which neither sdpa nor torch's varlen kernel supports
        base, base_attention = "eager", _eager_attention(module)
    device = query.device.type
    if base != "eager" and torch.is_autocast_enabled(device):  # rotary embeddings mix float32 and half precision
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    if _takes_varlen(base, query, kind, layout, **kwargs):
        return _varlen_attention(base, query, key, value, layout, **kwargs)[None], None
    if base != "eager":  # flash kernels take no custom mask, flex attention no causal attention without one
        base_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    # Queries that share a key become one longer sequence, so that no key is repeated: sdpa's masked kernels want
    # as many heads of keys as of queries
    folds = base != "eager" and kwargs.get("position_bias") is None
    groups = query.size(1) // key.size(1) if folds else 1

    outputs = []
    for block in layout.blocks:
        # Additive masks: eager attention would silently add a boolean mask, and sdpa convert it anew in each layer
        prompt_mask, branch_mask = layout.masks(block, kind, query.dtype, is_causal=base != "eager", groups=groups)
        index = block.prompt_index
        output, _ = base_attention(
            module, _gather(query, index), _gather(key, index), _gather(value, index), prompt_mask, **kwargs
        )
        outputs.append(output.flatten(0, 1))
        if block.branch_index.numel() == 0:
            continue
        branches = _gather(query, block.branch_index), _gather(key, block.key_index), _gather(value, block.key_index)
        if groups > 1:
            output = _grouped_attention(*branches, branch_mask, groups, **kwargs)
        else:
            output, _ = base_attention(module, *branches, branch_mask, **kwargs)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.restore_index)[None], None


def _grouped_attention(query, key, value, mask, groups, dropout=0.0, scaling=None, **kwargs):
    """Attention where the query heads that share a key follow each other in one sequence."""
    folded = query.unflatten(1, (-1, groups)).transpose(2, 3).flatten(2, 3)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)


def _rescaled(module, query, places: torch.Tensor):
    """
    Queries `(B, heads, T, head_dim)` that were scaled by their places in the row, scaled by those in their sequence.
    """
    query_scale = family_of(module).query_scale
    applied = query_scale(module, torch.arange(places.size(-1), device=places.device))
    if applied is None:
        return query
    return query * (query_scale(module, places) / applied).to(query.dtype)[:, None, :, None]


def _gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`(1, heads, T, head_dim)` at `(N, L)` positions becomes `(N, heads, L, head_dim)`."""
    picked = states[0].index_select(1, index.flatten())
    return picked.view(picked.size(0), *index.shape, picked.size(-1)).transpose(0, 1)


def _takes_varlen(base, query, kind, layout, dropout=0.0, softcap=None, **kwargs) -> bool:
    if base == "eager" or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    # Torch's kernel pads no head dimension and runs from Ampere on
    head_dim, capability = query.size(-1), torch.cuda.get_device_capability(query.device)
    torch_kernel = softcap is None and head_dim <= 256 and head_dim % 8 == 0 and capability >= (8, 0)
    return (base == "flash_attention_2" or torch_kernel) and dropout == 0.0 and kind in layout.causal_layers


def _varlen_attention(base, query, key, value, layout: PrefixLayout, scaling=None, softcap=None, **kwargs):
    keys, query_starts, key_starts, longest_query, longest_key = layout.varlen
    # `(T, heads, head_dim)`; grouped-query attention needs no repeated keys here
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    key, value = key.index_select(0, keys), value.index_select(0, keys)
    sequences = (query_starts, key_starts, longest_query, longest_key)
    if base == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            query, key, value, *sequences, softmax_scale=scaling, causal=True, softcap=softcap or 0.0
        )
    from torch.nn.attention.varlen import varlen_attn  # whose import takes longer than that of this folder

    return varlen_attn(query, key, value, *sequences, scale=scaling, window_size=(-1, 0), **_gqa_option(varlen_attn))


@functools.cache
def _gqa_option(kernel: Callable) -> dict[str, Any]:
    """What permits fewer heads of keys than of queries, which torch before 2.13 always does."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}
