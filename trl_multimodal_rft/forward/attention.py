# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Attention over a packed row: each branch (a completion, see `layout`) attends to itself and to its prompt, which the
row holds once.
"""

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
from .encoders import install_encoder_attention, original_encoders
from .kernels import AttentionOptions
from .layout import PrefixLayout
from .masks import sharing_obstacle
from .shared_cache import Decoding
from .states import gather_copies, install_prefix_states


# An attention function of transformers. Its arguments are a module, the query, key and value of `B` rows with `S`
# tokens, `(B, heads, S, head_dim)`, a mask and options. It returns outputs, and attention weights or `None`.
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_PREFIX = "prefix_shared_"
_FLASH_LIBRARY = "flash_attention_2"  # the implementation of the flash-attn library

# Flash implementations whose wrapper is registered under the name of the original, without the prefix
_WRAPPED: set[str] = set()

# Config of the decoder while the decoder runs a packed row, else `None`. For this config, mask functions of
# transformers create no mask `(T, T)`, as the layers take the layout instead.
_packed_config: ContextVar[PreTrainedConfig | None] = ContextVar("_packed_config", default=None)


def install_prefix_attention(model: PreTrainedModel) -> None:
    """
    Enables the text decoder of a model to run packed rows.

    The decoder's attention function takes a [`PrefixLayout`] or a [`Decoding`] as the keyword argument `prefix_layout`
    of the forward. Layers that carry a state from token to token, such as linear attention, take a layout, too
    ([`~forward.states.install_prefix_states`]). Without the argument, results are the same as before. Encoders get a
    faster attention with the same results ([`~forward.encoders.install_encoder_attention`]).

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
    """
    install_prefix_states(model)
    install_encoder_attention(model)
    decoder = model.get_decoder()
    implementation = decoder.config._attn_implementation or "eager"
    if implementation.startswith(_PREFIX) or implementation in _WRAPPED:
        return
    original = None if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]

    # transformers calls it with `prefix_layout` for packed rows and decoding steps, and without it for padded rows
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
            return _prefix_attention(base_attention, implementation, module, query, key, value, prefix_layout, options)

    if "flash" in implementation:  # transformers loads flash kernels by this name, so the name must stay
        AttentionInterface.register(implementation, attention)
        _WRAPPED.add(implementation)
        return
    name = _PREFIX + implementation
    AttentionInterface.register(name, attention)
    create_mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation]

    def create_unless_packed(
        *args: torch.Tensor, config: PreTrainedConfig | None = None, **kwargs: torch.Tensor | Callable | int | None
    ) -> torch.Tensor | None:
        runs_packed = config is not None and config is _packed_config.get()
        return None if runs_packed else create_mask(*args, config=config, **kwargs)

    AttentionMaskInterface.register(name, create_unless_packed)
    decoder.set_attn_implementation(name)


def attention_obstacle(model: PreTrainedModel) -> str | None:
    """Returns the reason why a text decoder's attention implementation gives wrong results, or `None`."""
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
    Overrides or adds inputs of a model's text decoder within the context. With the input `prefix_layout`, transformers
    creates no masks for the decoder.
    """
    decoder = model.get_decoder()
    token = _packed_config.set(decoder.config if "prefix_layout" in inputs else None)
    try:
        with decoder.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, **inputs}), with_kwargs=True
        ):
            yield
    finally:
        _packed_config.reset(token)


def takes_layouts(model: PreTrainedModel) -> bool:
    """
    Returns whether a model's attention takes layouts in decoding, too. Flash implementations are excluded: they keep
    their names and the masks that transformers creates for them.
    """
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
    return sys.modules[type(module).__module__].eager_attention_forward


def _prefix_attention(
    base_attention: Attention,
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PrefixLayout,
    options: AttentionOptions,
) -> tuple[torch.Tensor, None]:
    """
    Computes attention of a packed row of `T` tokens: causal layers by a variable-length kernel if there is one, others
    block by block with masks; an index restores the row's order. Query, key and value are `(1, heads, T, head_dim)`,
    the result `(1, T, heads, head_dim)`.
    """
    layer_type = None  # masks and windows are by layer type, which is `None` if all layers have one type
    if None not in layout.blocks[0].layer_masks[0]:
        layer_type = cast(PreTrainedConfig, module.config).layer_types[cast(int, module.layer_idx)]
    if options.get("s_aux") is not None:  # attention sinks, which neither sdpa nor torch's varlen kernel supports
        implementation = "eager"
        base_attention = _eager_attention(module)
    device = query.device.type
    # Under autocast, rotary embeddings turn some of the states into float32, and kernels need equal dtypes
    if implementation != "eager" and torch.is_autocast_enabled(device):
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    # `row_states`: keys and values of the row. `shared_states`: keys and values that hold the prompt, from the cache
    # if the row leaves the prompt out.
    row_states = shared_states = key, value
    if layout.states is not None and layout.n_cached:
        shared_states = layout.states[module]
    elif layout.states is not None:
        layout.states.setdefault(module, row_states)  # activation checkpointing runs the layer again: keep the first
    # `with_prompts`: prompts are causal, too, so one kernel call computes prompts and branches
    window, with_prompts = layout.windows.get(layer_type, (None, False))
    uses_varlen = layer_type in layout.windows and _uses_varlen_kernel(implementation, query, value, options)
    varlen_outputs = []
    # Without branches, a call for branches alone would have no queries
    if uses_varlen and (with_prompts or any(start != parent for start, _, parent, _ in layout.segments)):
        varlen_outputs = [
            _varlen_attention(implementation, query, row_states, shared_states, layout, window, with_prompts, options)
        ]
        if with_prompts:
            return varlen_outputs[0][None], None
    # Unless attention is eager, the blocks run SDPA: flash kernels take no custom mask, and flex attention isn't
    # causal without a mask
    if implementation != "eager":
        base_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    if not uses_varlen:
        key, value = _with_prefix(shared_states, row_states)
    # Masked kernels of SDPA require equally many query and key heads. Instead of repeating keys, `_grouped_attention`
    # joins the query heads that share a key head to one longer sequence of queries.
    folds_heads = implementation != "eager" and options.get("position_bias") is None
    heads_per_key = query.size(1) // key.size(1) if folds_heads else 1

    # Masks are additive. Eager attention would silently add a boolean mask as numbers, and SDPA would convert it in
    # each layer.
    outputs = []
    for block in layout.blocks:
        if block.starts:
            query_positions, key_positions, mask = layout.prompts(
                block, layer_type, query.dtype, is_causal=implementation != "eager"
            )
            states = _gather(query, query_positions), _gather(key, key_positions), _gather(value, key_positions)
            output, _ = base_attention(module, *states, mask, **options)
            # `layout.prompts` may split each of `N` prompts into chunks of queries. Joins the chunks, and drops the
            # padding of the last chunk: `(N, P, heads, head_dim)`, with `P` tokens of the longest prompt.
            output = output.unflatten(0, (len(block.sizes), -1)).flatten(1, 2)[:, : block.prompt_index.size(1)]
            outputs.append(output.flatten(0, 1))
        if not uses_varlen and block.branch_index.numel():
            query_positions, key_positions, mask = layout.branches(block, layer_type, query.dtype, heads_per_key)
            states = _gather(query, query_positions), _gather(key, key_positions), _gather(value, key_positions)
            if heads_per_key > 1:
                output = _grouped_attention(*states, mask, heads_per_key, options)
            else:
                output, _ = base_attention(module, *states, mask, **options)
            outputs.append(output.flatten(0, 1))
    restore_index = layout.varlen_restore_index if uses_varlen else layout.restore_index
    return torch.cat(outputs + varlen_outputs).index_select(0, restore_index)[None], None


def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads_per_key: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """
    Computes attention with the `G = heads_per_key` query heads of a key head as one longer sequence. For `M` branches:
    query `(M, heads, L, head_dim)`, key and value `(M, heads / G, K, head_dim)`, mask `(1 or M, 1, L * G, K)`; returns
    `(M, L, heads, head_dim)`.
    """
    folded = query.unflatten(1, (-1, heads_per_key)).transpose(2, 3).flatten(2, 3)
    dropout = options.get("dropout", 0.0)
    scaling = options.get("scaling")
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.unflatten(2, (-1, heads_per_key)).transpose(1, 2).flatten(2, 3)


def _rescale(module: nn.Module, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """
    Replaces the scale of queries `(B, heads, T, head_dim)` in families that scale by position: the layer took the
    position in the row, and `positions` `(B, T)` are those in a query's own sequence.
    """
    query_scale = family_of(module).query_scale
    row_scale = query_scale(module, torch.arange(positions.size(-1), device=positions.device))
    if row_scale is None:
        return query
    return query * (query_scale(module, positions) / row_scale).to(query.dtype)[:, None, :, None]


def _gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers states `(1, heads, T, head_dim)` at row positions `(N, L)`, as `(N, heads, L, head_dim)`."""
    gathered_states = gather_copies(states.squeeze(0), index.flatten(), dim=1)
    return gathered_states.view(gathered_states.size(0), *index.shape, gathered_states.size(-1)).transpose(0, 1)


def _uses_varlen_kernel(
    implementation: str, query: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> bool:
    if implementation == "eager" or options.get("dropout", 0.0) != 0.0 or options.get("position_bias") is not None:
        return False
    return kernels.has_varlen_kernel(query) and (
        implementation == _FLASH_LIBRARY or _torch_kernel_supports(query, value, options)
    )


def _torch_kernel_supports(query: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
    return options.get("softcap") is None and max(query.size(-1), value.size(-1)) <= 256


def _with_prefix(
    prefix: tuple[torch.Tensor, torch.Tensor], states: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a cache, both arguments are one object."""
    if prefix is states:
        return states
    return torch.cat([prefix[0], states[0]], dim=2), torch.cat([prefix[1], states[1]], dim=2)


def _varlen_attention(
    implementation: str,
    query: torch.Tensor,
    row_states: tuple[torch.Tensor, torch.Tensor],
    shared_states: tuple[torch.Tensor, torch.Tensor],
    layout: PrefixLayout,
    window: int | None,
    with_prompts: bool,
    options: AttentionOptions,
) -> torch.Tensor:
    """
    Computes attention of branches, and of prompts if `with_prompts`, by variable-length kernels. Returns `(Q, heads,
    head_dim)` for `Q` queries, in row order.
    """
    # Two kernel calls, for a branch's own keys and for shared keys, copy fewer keys than one call. Their outputs are
    # merged by log-sum-exp. This requires a layer without a window, and torch's kernel, which returns the log-sum-exp.
    merges_calls = window is None and _torch_kernel_supports(query, row_states[1], options)
    call_arguments = layout.shared_sequences(with_prompts) if merges_calls else None
    if call_arguments is None:
        row_states = shared_states = _with_prefix(shared_states, row_states)
    # `(T, heads, head_dim)`; the kernels accept fewer key heads than query heads
    query, *states = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, *row_states, *shared_states))
    if call_arguments is not None:
        query_positions, sequences, merged_index, key_positions, shared_sequences = call_arguments
        return kernels.merged_attention(
            *(kernels.rows_at(tensor, query_positions) for tensor in (query, *states[:2])),
            *(gather_copies(tensor, key_positions) for tensor in states[2:]),
            index=merged_index,
            sequences=sequences,
            shared_sequences=shared_sequences,
            scaling=options.get("scaling"),
        )
    query_positions, key_positions, sequences = layout.sequences(window, with_prompts)
    return kernels.varlen_attention(
        kernels.rows_at(query, query_positions),
        *(gather_copies(tensor, key_positions) for tensor in states[:2]),
        sequences=sequences,
        scaling=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        softcap=options.get("softcap"),
        uses_library=implementation == _FLASH_LIBRARY,
    )
