# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention over a packed row, in which branches attend to themselves and to a prompt that the row holds once."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..families import family_of
from ..models.wrapped import replaced
from . import kernels
from .decoding import Decoding
from .features import install_encoder_attention, original_encoders
from .kernels import AttentionOptions
from .layout import PrefixLayout
from .masks import sharing_obstacle
from .states import gather_copies, install_prefix_states


# An attention function of transformers, called with a module, states `(B, heads, S, head_dim)`, a mask and options
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_PREFIX = "prefix_shared_"
_LIBRARY = "flash_attention_2"  # the implementation of the flash-attn library

# Names of implementations whose wrapper is registered under the same name
_WRAPPED: set[str] = set()

# Config of the decoder that runs a packed row. Its layers read no masks `(T, T)`, so that none are created.
_runs_packed: ContextVar[PreTrainedConfig | None] = ContextVar("_runs_packed", default=None)


def install_prefix_attention(model: PreTrainedModel) -> None:
    """
    Enables the text decoder of a model to run packed rows.

    Its attention function, and layers that carry a state ([`~forward.states.install_prefix_states`]), take a
    [`PrefixLayout`] or a [`Decoding`] from the keyword arguments of the forward. Without this argument, they compute
    the same as before. Encoders get a faster attention with the same results
    ([`~forward.features.install_encoder_attention`]).

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
    """
    install_prefix_states(model)
    install_encoder_attention(model)
    decoder = model.get_decoder()
    base = decoder.config._attn_implementation or "eager"
    if base.startswith(_PREFIX) or base in _WRAPPED:
        return
    original = None if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]

    @torch.compiler.disable
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        prefix_layout: PrefixLayout | Decoding | None = None,
        token_positions: torch.Tensor | None = None,
        **options: Unpack[AttentionOptions],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base_attention = original or _eager_attention(module)
        if token_positions is not None:
            query = _rescale(module, query, token_positions)
        if isinstance(prefix_layout, Decoding):
            return prefix_layout.attend(module, query, key, value, options), None
        with kernels.without_cudnn():
            if prefix_layout is None:
                return base_attention(module, query, key, value, attention_mask, **options)
            return _prefix_attention(base_attention, base, module, query, key, value, prefix_layout, options)

    if "flash" in base:  # the name must stay, as transformers loads these kernels by it
        AttentionInterface.register(base, attention)
        _WRAPPED.add(base)
        return
    name = _PREFIX + base
    AttentionInterface.register(name, attention)
    create_mask = ALL_MASK_ATTENTION_FUNCTIONS[base]

    def create(
        *args: torch.Tensor, config: PreTrainedConfig | None = None, **kwargs: torch.Tensor | Callable | int | None
    ) -> torch.Tensor | None:
        runs_packed = config is not None and config is _runs_packed.get()
        return None if runs_packed else create_mask(*args, config=config, **kwargs)

    AttentionMaskInterface.register(name, create)
    decoder.set_attn_implementation(name)


def attention_obstacle(model: PreTrainedModel) -> str | None:
    """Returns a message if the attention implementation of a text decoder ignores a part of the model, or `None`."""
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
def decoder_inputs(model: PreTrainedModel, **inputs: torch.Tensor | PrefixLayout | Decoding | bool) -> Iterator[None]:
    """
    Overrides or adds inputs of a model's text decoder within the context. With a `prefix_layout`, no masks are created
    for the decoder.
    """
    decoder = model.get_decoder()
    token = _runs_packed.set(decoder.config if "prefix_layout" in inputs else None)
    try:
        with decoder.register_forward_pre_hook(
            lambda module, args, received: (args, {**received, **inputs}), with_kwargs=True
        ):
            yield
    finally:
        _runs_packed.reset(token)


def takes_layouts(model: PreTrainedModel) -> bool:
    """Returns whether the attention of a model takes a [`PrefixLayout`] or a [`Decoding`]."""
    implementation = model.get_decoder().config._attn_implementation or ""
    return implementation.startswith(_PREFIX) and sharing_obstacle(model) is None


@contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Restores the attention implementations that [`install_prefix_attention`] replaced, within the context."""
    config = model.get_decoder().config
    original = (config._attn_implementation or "eager").removeprefix(_PREFIX)
    with replaced(config, _attn_implementation=original), original_encoders(model):
        yield


def _eager_attention(module: nn.Module) -> Attention:
    """Returns the eager attention of the module's modeling file."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _prefix_attention(
    base_attention: Attention,
    base: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PrefixLayout,
    options: AttentionOptions,
) -> tuple[torch.Tensor, None]:
    """
    Computes attention of a packed row.

    Shapes: query, key, value `(1, heads, T, head_dim)`; returns `(1, T, heads, head_dim)`.
    """
    kind = None
    if None not in layout.blocks[0].layer_masks[0]:
        kind = cast(PreTrainedConfig, module.config).layer_types[cast(int, module.layer_idx)]
    if options.get("s_aux") is not None:  # attention sinks, which neither sdpa nor torch's varlen kernel supports
        base, base_attention = "eager", _eager_attention(module)
    device = query.device.type
    if base != "eager" and torch.is_autocast_enabled(device):  # rotary embeddings mix float32 and half precision
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    row_states = shared_states = key, value
    if layout.states is not None and layout.n_cached:
        shared_states = layout.states[module]
    elif layout.states is not None:
        layout.states.setdefault(module, row_states)  # the recomputation of checkpointing must not replace them
    window, with_prompts = layout.windows.get(kind, (None, False))
    takes_varlen = kind in layout.windows and _takes_varlen(base, query, value, options)
    varlen_outputs = []
    if takes_varlen and (with_prompts or any(start != parent for start, _, parent, _ in layout.segments)):
        varlen_outputs = [
            _varlen_attention(base, query, row_states, shared_states, layout, window, with_prompts, options)
        ]
        if with_prompts:
            return varlen_outputs[0][None], None
    if base != "eager":  # flash kernels take no custom mask; flex attention needs a mask to be causal
        base_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    if not takes_varlen:
        key, value = _concatenate(shared_states, row_states)
    # Query heads that share a key head become one longer sequence of queries. Otherwise, keys would be repeated, as
    # masked kernels of sdpa require as many key heads as query heads.
    folds = base != "eager" and options.get("position_bias") is None
    groups = query.size(1) // key.size(1) if folds else 1

    # Masks are additive, as eager attention would silently add a boolean mask as numbers, and sdpa would convert a
    # boolean mask in each layer
    outputs = []
    for block in layout.blocks:
        if block.starts:
            queries, keys, mask = layout.prompts(block, kind, query.dtype, is_causal=base != "eager")
            states = _gather(query, queries), _gather(key, keys), _gather(value, keys)
            output, _ = base_attention(module, *states, mask, **options)
            output = output.unflatten(0, (len(block.sizes), -1)).flatten(1, 2)[:, : block.prompt_index.size(1)]
            outputs.append(output.flatten(0, 1))
        if not takes_varlen and block.branch_index.numel():
            queries, keys, mask = layout.branches(block, kind, query.dtype, groups)
            states = _gather(query, queries), _gather(key, keys), _gather(value, keys)
            if groups > 1:
                output = _grouped_attention(*states, mask, groups, options)
            else:
                output, _ = base_attention(module, *states, mask, **options)
            outputs.append(output.flatten(0, 1))
    restore_index = layout.restore_sequences if takes_varlen else layout.restore_index
    return torch.cat(outputs + varlen_outputs).index_select(0, restore_index)[None], None


def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    groups: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Computes attention with the query heads that share a key head as one longer sequence of queries."""
    folded = query.unflatten(1, (-1, groups)).transpose(2, 3).flatten(2, 3)
    dropout, scaling = options.get("dropout", 0.0), options.get("scaling")
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)


def _rescale(module: nn.Module, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Changes the scale of queries `(B, heads, T, head_dim)` from row positions to `positions` in sequences."""
    query_scale = family_of(module).query_scale
    applied = query_scale(module, torch.arange(positions.size(-1), device=positions.device))
    if applied is None:
        return query
    return query * (query_scale(module, positions) / applied).to(query.dtype)[:, None, :, None]


def _gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers states `(1, heads, T, head_dim)` at positions `(N, L)`, as `(N, heads, L, head_dim)`."""
    picked = gather_copies(states.squeeze(0), index.flatten(), dim=1)
    return picked.view(picked.size(0), *index.shape, picked.size(-1)).transpose(0, 1)


def _takes_varlen(base: str, query: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
    """Returns whether a variable-length kernel computes the attention of a causal layer."""
    if base == "eager" or options.get("dropout", 0.0) != 0.0 or options.get("position_bias") is not None:
        return False
    return kernels.has_varlen_kernel(query) and (base == _LIBRARY or _fits_torch(query, value, options))


def _fits_torch(query: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
    """Returns whether torch's variable-length kernel supports these states and options, on devices that have it."""
    return options.get("softcap") is None and max(query.size(-1), value.size(-1)) <= 256


def _concatenate(
    prefix: tuple[torch.Tensor, torch.Tensor], states: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins keys and values of a prefix and of a row after it. If both are one object, there is no prefix."""
    if prefix is states:
        return states
    return torch.cat([prefix[0], states[0]], dim=2), torch.cat([prefix[1], states[1]], dim=2)


def _varlen_attention(
    base: str,
    query: torch.Tensor,
    row_states: tuple[torch.Tensor, torch.Tensor],
    shared_states: tuple[torch.Tensor, torch.Tensor],
    layout: PrefixLayout,
    window: int | None,
    with_prompts: bool,
    options: AttentionOptions,
) -> torch.Tensor:
    """Computes attention `(Q, heads, head_dim)` of branches, and of prompts if `with_prompts`, by varlen kernels."""
    # Torch's kernel returns the log-sum-exp, by which attention to a prompt and to a completion can be merged
    merges = window is None and _fits_torch(query, row_states[1], options)
    calls = layout.shared_sequences(with_prompts) if merges else None
    if calls is None:
        row_states = shared_states = _concatenate(shared_states, row_states)
    # `(T, heads, head_dim)`; grouped-query attention needs no repeated keys here
    query, *states = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, *row_states, *shared_states))
    if calls is not None:
        rows, sequences, merged_index, keys, shared_sequences = calls
        return kernels.merged_attention(
            *(kernels.rows_at(tensor, rows) for tensor in (query, *states[:2])),
            *(gather_copies(tensor, keys) for tensor in states[2:]),
            index=merged_index,
            sequences=sequences,
            shared_sequences=shared_sequences,
            scaling=options.get("scaling"),
        )
    queries, keys, sequences = layout.sequences(window, with_prompts)
    return kernels.varlen_attention(
        kernels.rows_at(query, queries),
        *(gather_copies(tensor, keys) for tensor in states[:2]),
        sequences=sequences,
        scaling=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        softcap=options.get("softcap"),
        library=base == _LIBRARY,
    )
