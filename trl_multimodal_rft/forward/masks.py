# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention masks of a model in compressed form, from the functions by which the model creates its masks."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..models.wrapped import replaced
from ..versions import cache_name
from .layer_masks import Causal, LayerMask
from .prompt_groups import group_by_prompt
from .states import STATE_LAYERS, names_in_code, states_obstacle
from .trees import Node, prompt_trees


# Name of the KV cache in inputs and outputs of models
KV_CACHE = cache_name()

# Layer types whose tokens interact through attention alone
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

# Maximum number of mask elements that are created at a time: 16 MiB of booleans
_MASK_ELEMENTS = 2**24

# Functions of transformers that create sliding-window masks
_MASKS_WITH_WINDOWS = {
    "create_sliding_window_causal_mask",
    "create_reference_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}

# Layer types whose tokens don't interact
POINTWISE_LAYERS = {"mlp", "moe"}


def linear_masks(model: PreTrainedModel, prompt: EncodedPrompt, n_new: int) -> dict[str | None, LayerMask]:
    """
    Returns the masks, by layer type (`None` if there is one), that the model itself would create for a prompt and
    `n_new` tokens of text, with all rules of its family; a causal mask would silently move log-probabilities by up to
    2 nats. Tensors cover all tokens or more, and are cached on the prompt.
    """
    # -1: the cache is empty
    n_cached, cached_masks = prompt.mask_cache.get("linear", (-1, {}))
    if n_cached >= n_new:
        return cached_masks
    fill = family_of(model).token_field_fill
    masks = None

    def fields(size: int, n_new: int) -> dict[str, torch.Tensor]:
        """Returns the token fields, `(1, size + n_new)`, of the first `size` prompt tokens and `n_new` text tokens."""
        fields_of_prompt = prompt.token_fields.items()
        text_fields = {name: prompt.field_after(name, n_new, fill.get(name, 0)) for name, _ in fields_of_prompt}
        return {name: torch.cat([value[:size], text_fields[name]])[None] for name, value in fields_of_prompt}

    size = windows_reach(model)
    if size < len(prompt) and not _marks_media(prompt, n_new, fill):
        short_masks = _model_masks(model, size, 1, fields(size, 1))
        masks = short_masks if _is_causal(short_masks) else None
    if masks is None:
        masks = _model_masks(model, len(prompt), n_new, fields(len(prompt), n_new))
    prompt.mask_cache["linear"] = (n_new, masks)
    return masks


def windows_reach(model: PreTrainedModel) -> int:
    """
    Returns the number of tokens, twice the longest window and 2 more, that shows whether masks of text are causal:
    they depend on distances alone, so the start of a longer prompt shows its masks.
    """
    config = model.config.get_text_config(decoder=True)
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    return 2 * max(windows) + 2


def _marks_media(prompt: EncodedPrompt, n_new: int, fill: Mapping[str, int]) -> bool:
    """Returns whether token fields of a prompt, or of an answer's or tool's media after it, aren't those of text."""
    return any(
        value.any() or (prompt.field_after(name, n_new, fill.get(name, 0)) != fill.get(name, 0)).any()
        for name, value in prompt.token_fields.items()
    )


def _model_masks(
    model: PreTrainedModel, size: int, n_new: int, fields: dict[str, torch.Tensor]
) -> dict[str | None, LayerMask]:
    """The prompt has `size` tokens, and `n_new` tokens come after it."""
    total = size + n_new
    default_create: Callable[..., torch.Tensor | dict | None] = masking_utils.create_masks_for_generate
    create = getattr(model, "create_masks_for_generate", default_create)
    # For SDPA, transformers creates a boolean mask, or `None` if attention is plain causal. `_masks_by_rows` replaces
    # a boolean mask without gaps by the spans of all `T = total` tokens, `(T, 2)`.
    with replaced(model.config.get_text_config(decoder=True), _attn_implementation="sdpa"), _masks_by_rows():
        masks = create(
            config=_without_pointwise_layers(windows_as_forwarded(model)),
            inputs_embeds=torch.empty(1, total, 0),  # masks depend on its length, not on its values
            attention_mask=torch.ones(1, total, dtype=torch.long),
            position_ids=torch.arange(total)[None],
            is_first_iteration=True,
            **{KV_CACHE: None, **fields},
        )
    masks = masks if isinstance(masks, dict) else {None: masks}
    masks = {
        layer_type: mask for layer_type, mask in masks.items() if layer_type is None or layer_type in ATTENTION_LAYERS
    }
    for layer_type, mask in masks.items():
        # Spans have 2 dimensions
        if mask is not None and mask.dim() != 2 and (mask.dim() != 4 or mask.dtype != torch.bool):
            raise NotImplementedError(
                f"{type(model).__name__} creates no 4D boolean mask for its layers of type {layer_type!r}, so its "
                "prompts can't be shared."
            )
    return {layer_type: None if mask is None else _compress(mask, size) for layer_type, mask in masks.items()}


def _spans(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Returns the spans of visible tokens in the rows of a boolean mask `(R, K)`, as `(R, 2)`: the index of the first
    visible token, and the index after the last one. Returns `None` if a row has gaps: `[0, 1, 1, 0]` becomes `[1, 3]`,
    and `[1, 0, 1, 0]` has a gap.
    """
    starts, ends = (values.to(torch.uint8).argmax(1) for values in (mask, mask.flip(1)))
    spans = torch.stack([starts, mask.size(1) - ends], dim=1)
    return spans if mask.sum(1).equal(spans[:, 1] - starts) else None


@contextmanager
def _masks_by_rows() -> Iterator[None]:
    """
    Makes transformers create masks for SDPA as spans of `T` tokens, `(T, 2)`, see [`_spans`], within the context. A
    mask with gaps stays a boolean mask. Rows of large masks are created a few at a time, to save memory.
    """
    create_mask = cast(Callable[..., torch.Tensor], masking_utils.sdpa_mask)

    def by_rows(
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        **options: Callable | torch.Tensor | torch.device | int | None,
    ) -> torch.Tensor | None:
        if allow_is_causal_skip and (local_size is None or kv_length < local_size):
            return None  # plain causal attention
        options |= {"kv_length": kv_length, "local_size": local_size, "allow_is_causal_skip": False}
        spans = []
        for rows in torch.arange(q_length).split(max(_MASK_ELEMENTS // kv_length, 1)):
            mask = create_mask(q_length=len(rows), q_offset=q_offset + int(rows[0]), **options)
            spans_of_rows = _spans(mask[0, 0])
            if spans_of_rows is None:
                return create_mask(q_length=q_length, q_offset=q_offset, **options)
            spans.append(spans_of_rows)
        return torch.cat(spans)

    mask_functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    mask_functions["sdpa"] = by_rows  # an entry of this instance, which hides the class's entry until its deletion
    try:
        yield
    finally:
        del mask_functions["sdpa"]


def _compress(mask: torch.Tensor, size: int) -> LayerMask:
    """
    Compresses the mask of a prompt of `size` tokens and of text after it, `T` tokens in all. Returns [`Causal`] if the
    text is causal in a window, else the mask as spans `(T, 2)` or as a boolean mask `(T, T)`.
    """
    full_mask = mask[0, 0] if mask.dim() == 4 else None  # `None` if the mask is spans
    # Spans of all tokens, or, from a full mask, of the prompt's last token and of the text
    spans = mask if full_mask is None else _spans(full_mask[size - 1 :])
    if spans is None:
        return full_mask
    starts, ends = spans.unbind(1)
    total = int(spans[-1, 1])
    positions = torch.arange(total - len(spans), total)
    # The span of the last token shows the window. Without a window, the span starts at 0.
    window = None if starts[-1] == 0 else total - int(starts[-1])
    is_causal = (ends == positions + 1) & (starts == (positions - (window or total) + 1).clamp(min=0))
    # The text, and the prompt's last token, since a branch of a packed row starts with a copy of this token
    if not is_causal[size - 1 - total :].all():
        return mask if full_mask is None else full_mask
    if full_mask is not None:
        return Causal(window, full_mask[:size, :size].clone(), None)
    if is_causal.all():
        return Causal(window)
    # Largest distances at which prompt tokens see earlier and later tokens
    lookback = int((positions - starts)[:size].max())
    lookahead = int((ends - positions - 1)[:size].max())
    return Causal(window, spans[:size], lookahead if lookback < (window or size) else None)


def trees_of(model: PreTrainedModel, prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> list[Node]:
    """Returns the prefix trees of completions' prompts in a packed row. `lengths` are the completions' lengths."""
    groups = group_by_prompt(prompts)
    n_completion_tokens = {prompt: sum(lengths[i] for i in members) for prompt, members in groups.items()}
    # Masks show which prompts can share tokens. A single prompt has no other prompt to share them with.
    masks = {prompt: linear_masks(model, prompt, max(lengths)) for prompt in groups} if len(groups) > 1 else {}
    return prompt_trees(n_completion_tokens, {prompt for prompt, by_layer in masks.items() if _is_causal(by_layer)})


def _is_causal(masks: Mapping[str | None, LayerMask]) -> bool:
    return all(mask is None or (isinstance(mask, Causal) and mask.prompt is None) for mask in masks.values())


def windows_as_forwarded(model: PreTrainedModel) -> PreTrainedConfig:
    """
    Returns a model's config, or a copy of its text config without windows if its forward creates a plain causal mask
    for all layers: transformers' masks and caches read the config alone, and would apply them.
    """
    config = model.config.get_text_config(decoder=True)
    window_names = [
        name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None) is not None
    ]
    modules = (model, model.base_model, model.get_decoder())
    # Names in the code of the forwards show which masks they create
    code_names = set().union(*(names_in_code(type(module))[0] for module in modules))
    if not window_names or "create_causal_mask" not in code_names or code_names & _MASKS_WITH_WINDOWS:
        return model.config
    config = copy.copy(config)
    for name in window_names:
        setattr(config, name, None)
    return config


def _without_pointwise_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a config without pointwise layers. Transformers would create no masks for a config with such layers."""
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None) or ()
    if POINTWISE_LAYERS.isdisjoint(layer_types):
        return config
    text_config = copy.copy(text_config)
    text_config.layer_types = [layer_type for layer_type in layer_types if layer_type not in POINTWISE_LAYERS]
    return text_config


def sharing_obstacle(model: PreTrainedModel) -> str | None:
    """Returns the reason why completions of a model can't share their prompt in one row, or `None` if they can."""
    family = family_of(model)
    if family.sharing_obstacle is not None:
        return family.sharing_obstacle
    if family.token_masks:
        return f"its layers look at media through a mask for each token ({', '.join(family.token_masks)})"
    config = model.config.get_text_config(decoder=True)
    unknown_types = (
        set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS - STATE_LAYERS - POINTWISE_LAYERS
    )
    if unknown_types:
        return f"how layers of type {', '.join(sorted(unknown_types))} see a prompt is unknown"
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or not decoder._can_set_attn_implementation():
        return "its attention can't be replaced (it does not use transformers' attention interface)"
    return states_obstacle(model)
