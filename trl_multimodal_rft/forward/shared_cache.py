# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Decoding of completions, one token at a time, with a KV cache that holds each prompt once.

With `N` prompts of `P` tokens and `B` completions, the completions of a prompt are `G = B / N` consecutive rows. For
example, 2 prompts of 9 tokens with 2 completions each, of `n` tokens so far: the prompts' keys are `(2, heads, 9,
head_dim)`, and the completions' keys `(4, heads, n, head_dim)`. Rows 0 and 1 attend to prompt 0, rows 2 and 3 to
prompt 1.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from . import kernels
from .kernels import AttentionOptions


# Number of tokens by which a cache grows. Also the initial size of a cache with static shapes.
ROOM = 128

# Up to this prompt length, completions get copies of the prompt: one attention call is faster than two merged calls
SHORT_PROMPT = 64

# Added to the scores of masked keys. It is finite in any dtype, so a row without visible keys gets no NaN.
_MASKED = -3e4


def _states(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return cast(tuple[torch.Tensor, torch.Tensor], (layer.keys, layer.values))


class CompletionLayer(DynamicLayer):
    """
    A KV cache layer of `B` completions with `n` tokens, `(B, heads, size, head_dim)`; the layer `prompts` holds the
    prompts'. `slot` `(1,)` is where the next token goes, wrapping at a window's end. With a `room`, shapes are static,
    and only [`grow`] enlarges. With `n` at the start, buffers begin with copies of prompts of `n` tokens.
    """

    def __init__(self, prompts: DynamicLayer, n_rows: int, slot: torch.Tensor, room: int, n: int):
        super().__init__()
        keys, values = _states(prompts)
        # Under autocast, rotary embeddings make keys float32. `states` and `prompts` get keys in the values' dtype.
        prompts.keys = keys.to(values.dtype)
        states = prompts.keys, values
        self.lazy_initialization(*states)
        self.prompts = prompts
        self.window = getattr(prompts, "sliding_window", None)
        self.n = n
        self._slot = slot
        self._is_static = room > 0
        copies = (tensor[:, :, :n].repeat_interleave(n_rows // len(keys), 0) for tensor in states)
        self.keys, self.values = (tensor.contiguous() for tensor in copies)
        self.grow(n + room)
        if n:  # nothing is left to attend to in `prompts`
            prompts.keys, prompts.values = (tensor[:1, :, :0].clone() for tensor in states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _states(self)
        if not self._is_static:
            self.n += 1
            size = keys.size(2)
            if size < min(self.n, self.window or self.n):
                self.grow(size + ROOM)
                keys, values = _states(self)
        keys.index_copy_(2, self._slot, key_states.to(keys.dtype))
        values.index_copy_(2, self._slot, value_states.to(values.dtype))
        return (keys, values) if self._is_static else (keys[:, :, : self.n], values[:, :, : self.n])

    def grow(self, room: int) -> None:
        """Enlarges the buffers to `room` tokens, or to the attention window if the window is shorter."""
        states = _states(self)
        missing = min(room, self.window or room) - states[0].size(2)
        if missing:
            self.keys, self.values = (F.pad(tensor, (0, 0, 0, missing)) for tensor in states)

    def get_seq_length(self) -> int:
        return self.prompts.get_seq_length() + self.n

    def crop(self, tokens_to_remove: int) -> None:
        # `tokens_to_remove` is negative, as in transformers' caches
        self.n += tokens_to_remove

    def join_prompts(self) -> DynamicLayer:
        """Returns the layer `prompts`, changed in place to one row per completion with prompt and completion."""
        self.prompts.keys, self.prompts.values = (
            torch.cat([prompts.repeat_interleave(len(states) // len(prompts), 0), states[:, :, : self.n]], dim=2)
            for prompts, states in zip(_states(self.prompts), _states(self), strict=True)
        )
        return self.prompts


@dataclass
class Decoding:
    """Shared prompts and attention masks of a decoding step, in which each completion gets one token."""

    shared: dict[
        int, DynamicLayer
    ]  # of prompts, by layer index; each has equally many completions, in consecutive rows
    padding: torch.Tensor | None = None  # additive mask of the prompts' tokens, (N, 1, 1, P)
    room: int = 0  # tokens per completion that the cache returns, if shapes are static
    # Index of the current token in the cache (1,), by attention window of the layers
    slots: dict[int | None, torch.Tensor] = field(default_factory=dict)
    mask: torch.Tensor | None = None  # additive, of copied prompts and of the completions after them, (B, 1, 1, K)

    # If shapes are static: additive masks of prompts, and of tokens that the cache returns, by attention window
    _masks: dict[int | None, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict, init=False)

    @property
    def n_prompts(self) -> int:
        """Number of rows in the prompts' layers: 1, of length 0, if completions have copies of their prompts."""
        return len(_states(next(iter(self.shared.values())))[0])

    def additive_mask(self, is_masked: torch.Tensor) -> torch.Tensor:
        """
        Converts a boolean mask, true on masked keys, to an additive mask. The mask is in float32, or in the dtype of
        the cache if that is wider, so that no layer has to cast it.
        """
        dtype = _states(next(iter(self.shared.values())))[1].dtype
        return is_masked.to(torch.promote_types(dtype, torch.float32)) * _MASKED

    def advance(self) -> None:
        """
        Advances the slots, which cache layers share, in place to the token of the next forward. With static shapes,
        computes the masks of this forward, too.
        """
        for window, slot in self.slots.items():
            slot.add_(1)
            if window is not None:
                slot.remainder_(window)
        if self.room:
            self._masks = {window: self._window_masks(window) for window in self.slots}

    def _window_masks(self, window: int | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        token = self.slots[None]
        padding = self.padding
        index = torch.arange(self.room, device=token.device)
        # Entries after the current token aren't written yet
        mask = self.additive_mask((index[: min(self.room, window or self.room)] > token)[None, None, None])
        prompt_layer = next((layer for layer in self.shared.values() if _window(layer) == window), None)
        if window is None or prompt_layer is None:
            return padding, mask
        size = _states(prompt_layer)[0].size(2)
        padding = None if padding is None else padding[..., padding.size(-1) - size :]
        # The window of the last token, and so of every token, holds the whole prompt
        if size + self.room <= window:
            return padding, mask
        # Key `i` of the prompt is `size - i + token` tokens before the current token. It is masked from `window` on.
        window_mask = self.additive_mask(
            (torch.arange(size, device=token.device) <= token + (size - window))[None, None, None]
        )
        return window_mask if padding is None else padding + window_mask, mask

    def grow(self, cache: Cache, room: int) -> None:
        """Gives a cache room for `room` tokens of each completion."""
        self.room = room
        for layer in cache.layers:
            if isinstance(layer, CompletionLayer):
                layer.grow(room)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """
        Computes attention `(B, 1, heads, head_dim)` of queries `(B, heads, 1, head_dim)` to their completions, `key`
        and `value` `(B, key heads, K, head_dim)`, and in a second call of a group's queries to their prompt, merged by
        log-sum-exp.
        """
        layer_index = cast(int, module.layer_idx)
        if layer_index not in self.shared:  # a layer without keys uses keys of the last layer of its type
            layer_types = cast(PreTrainedConfig, module.config).layer_types
            layer_index = max(i for i in self.shared if layer_types[i] == layer_types[layer_index])
        layer = self.shared[layer_index]
        prompt_key, prompt_value = _states(layer)
        padding = self.padding
        mask = self.mask
        window = _window(layer)
        if self.room:
            padding, mask = self._masks[window]
        elif window is not None:  # keys of the prompt before the window are left out
            first_key = max(prompt_key.size(2) + key.size(2) - window, 0)
            prompt_key = prompt_key[:, :, first_key:]
            prompt_value = prompt_value[:, :, first_key:]
            padding = None if padding is None else padding[..., padding.size(-1) - prompt_key.size(2) :]
        query = query.to(value.dtype)
        scaling = options.get("scaling")
        sinks = options.get("s_aux")
        settings = query.size(-1) ** -0.5 if scaling is None else scaling, options.get("softcap")
        # In the first layer of a step, the mask lacks the step's token
        if mask is not None and mask.size(-1) != key.size(2):
            mask = self.mask = F.pad(mask, (0, key.size(2) - mask.size(-1)))
        # The last argument is a key that isn't masked: the first, if entries after the current token aren't written
        # yet, or else the current token's
        output, lse = kernels.attention_with_lse(query, key, value, mask, *settings, 0 if self.room else -1)
        if sinks is not None:  # a sink adds to the denominator of the softmax alone
            sinks = sinks.view(1, -1, 1)
            output = output * (lse - sinks).sigmoid()[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, sinks)
        if prompt_key.size(2):
            expand = getattr(module, "expand_kv", None)
            if expand is not None:  # caches of latent attention hold latents
                prompt_key, prompt_value = expand(prompt_key, prompt_value)
            query, output_by_prompt, lse = (_by_prompt(tensor, len(prompt_key)) for tensor in (query, output, lse))
            prompt_output, prompt_lse = kernels.attention_with_lse(
                query, prompt_key, prompt_value, padding, *settings, -1
            )
            # The prompt's weight is its share of the softmax's denominator. In place: `output_by_prompt` is a view of
            # `output`, so this changes `output`.
            output_by_prompt.lerp_(prompt_output, (prompt_lse - lse).sigmoid()[..., None].to(prompt_output.dtype))
        return output.transpose(1, 2)


def set_lengths(cache: Cache, n: int) -> None:
    """Sets the number of tokens per completion, since a cache with static shapes doesn't count them."""
    for layer in cache.layers:
        if isinstance(layer, CompletionLayer):
            layer.n = n


def _window(layer: DynamicLayer) -> int | None:
    return getattr(layer, "sliding_window", None)


def _by_prompt(states: torch.Tensor, n: int) -> torch.Tensor:
    """Returns a view of states `(n * G, heads, 1, ...)` as `(n, heads, G, ...)`, for `n` prompts, by one operation."""
    group_size = len(states) // n
    batch_stride, head_stride, _, *other_strides = states.stride()
    return states.as_strided(
        (n, states.size(1), group_size, *states.shape[3:]),
        (group_size * batch_stride, head_stride, batch_stride, *other_strides),
    )


def share_prompts(cache: DynamicCache, mask: torch.Tensor, n_rows: int, room: int = 0) -> Decoding:
    """
    Turns the KV cache of `N` prompts, in place, into one of `n_rows` completions, equally many per prompt, with
    repeated recurrent states. The `mask` `(N, P)` is 1 on the prompts' tokens. With a `room`, shapes are static.
    """
    windows = {getattr(layer, "sliding_window", None) for layer in cache.layers}
    # Copies are faster for short prompts, and cost nothing if each prompt has one completion
    copies_prompts = not room and windows == {None} and (mask.size(1) <= SHORT_PROMPT or len(mask) == n_rows)
    decoding = Decoding({}, room=room)
    n = mask.size(1) if copies_prompts else 0
    if room:  # `advance` computes all masks from this slot, even if no layer uses it
        decoding.slots[None] = torch.full((1,), -1, device=mask.device)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            index = torch.arange(n_rows, device=mask.device) // (n_rows // len(mask))
            layer.reorder_cache(cast(torch.LongTensor, index))
        elif isinstance(layer, DynamicLayer):
            # `advance` precedes each forward, so a slot starts one before the first free entry
            slot = decoding.slots.setdefault(_window(layer), torch.full((1,), n - 1, device=mask.device))
            decoding.shared[i] = layer
            cache.layers[i] = CompletionLayer(layer, n_rows, slot, room, n)
    if not mask.all():
        padding = decoding.additive_mask(mask[:, None, None] == 0)
        if copies_prompts:
            decoding.mask = padding.repeat_interleave(n_rows // len(mask), 0)
        else:
            decoding.padding = padding
    return decoding
