# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions while they are decoded, a token at a time: their cache, and attention to prompts that it holds once."""

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from . import kernels
from .kernels import AttentionOptions


# Tokens to make room for at a time, or at first where shapes stay
ROOM = 128

# Prompts of at most so many tokens are copied to their completions, whose attention is faster than two that are merged
SHORT_PROMPT = 64

# Added to scores of what isn't attended to, in any dtype; where that is all, all are equal
_MASKED = -3e4


def _states(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of an initialized layer."""
    return cast(tuple[torch.Tensor, torch.Tensor], (layer.keys, layer.values))


class CompletionLayer(DynamicLayer):
    """
    A cache layer with the `n` tokens of each completion, behind the prompts that `prompts` has: at `slot`, from where
    a window starts anew. Room is made as needed, or, if it starts with a `room`, by [`grow`] alone: all of it is
    returned then, so that shapes stay. If it starts with copies of the `n` tokens of prompts, `prompts` keeps a single
    prompt, without tokens.
    """

    def __init__(self, prompts: DynamicLayer, n_rows: int, slot: torch.Tensor, room: int, n: int):
        super().__init__()
        keys, values = _states(prompts)
        states = prompts.keys, _ = keys.to(values.dtype), values  # under autocast, rotary embeddings are in float32
        self.lazy_initialization(*states)
        self.prompts, self.window, self.n = prompts, getattr(prompts, "sliding_window", None), n
        self._slot, self._is_static = slot, room > 0
        copies = (each[:, :, :n].repeat_interleave(n_rows // len(keys), 0) for each in states)
        self.keys, self.values = (each.contiguous() for each in copies)
        self.grow(n + room)
        if n:
            prompts.keys, prompts.values = (each[:1, :, :0].clone() for each in states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _states(self)
        if not self._is_static:
            self.n += 1
            if (size := keys.size(2)) < min(self.n, self.window or self.n):
                self.grow(size + ROOM)
                keys, values = _states(self)
        keys.index_copy_(2, self._slot, key_states.to(keys.dtype))
        values.index_copy_(2, self._slot, value_states.to(values.dtype))
        return (keys, values) if self._is_static else (keys[:, :, : self.n], values[:, :, : self.n])

    def grow(self, room: int) -> None:
        """Makes room for so many tokens, or for those in a window."""
        states = _states(self)
        if more := min(room, self.window or room) - states[0].size(2):
            self.keys, self.values = (F.pad(each, (0, 0, 0, more)) for each in states)

    def get_seq_length(self) -> int:
        return self.prompts.get_seq_length() + self.n

    def crop(self, tokens_to_remove: int) -> None:
        self.n += tokens_to_remove

    def whole(self) -> DynamicLayer:
        """Makes the layer of prompts one of completions, with the prompt of each before it."""
        self.prompts.keys, self.prompts.values = (
            torch.cat([prompts.repeat_interleave(len(states) // len(prompts), 0), states[:, :, : self.n]], dim=2)
            for prompts, states in zip(_states(self.prompts), _states(self), strict=True)
        )
        return self.prompts


@dataclass
class Decoding:
    """
    What the next token of each completion attends to: its prompt, and what the cache holds.

    Args:
        shared (`dict[int, DynamicLayer]`):
            By layer, the cache of prompts. Completions of a prompt follow each other, as many for each.
        padding (`torch.Tensor`, *optional*):
            What is added to scores of prompts, `(N, 1, 1, P)`.
        room (`int`, *optional*):
            How many tokens of a completion the cache returns, if shapes must stay.
        slots (`dict[int | None, torch.Tensor]`, *optional*):
            By attention window, where the cache has the token `(1,)`.
        mask (`torch.Tensor`, *optional*):
            What is added to scores of copies of prompts and of what is behind them, `(B, 1, 1, N)`.
    """

    shared: dict[int, DynamicLayer]
    padding: torch.Tensor | None = None
    room: int = 0
    slots: dict[int | None, torch.Tensor] = field(default_factory=dict)
    mask: torch.Tensor | None = None

    # Where shapes stay, by attention window: what is added to scores of prompts, and of what the cache returns
    _masks: dict[int | None, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict, init=False)

    @property
    def n_prompts(self) -> int:
        """How many prompts are shared: one, without tokens, if all are copied."""
        return len(_states(next(iter(self.shared.values())))[0])

    def masked(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to scores where `hidden` is true, in a dtype that no layer casts."""
        dtype = _states(next(iter(self.shared.values())))[1].dtype
        return hidden.to(torch.promote_types(dtype, torch.float32)) * _MASKED

    def advance(self) -> None:
        """Goes to the next token, which the next forward writes. Tensors change in place, or are made from those."""
        for window, slot in self.slots.items():
            slot.add_(1)
            if window is not None:
                slot.remainder_(window)
        if self.room:
            self._masks = {window: self._hidden(window) for window in self.slots}

    def _hidden(self, window: int | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What is added to scores of prompts, and of what the cache returns, in layers with an attention window."""
        token, padding = self.slots[None], self.padding
        index = torch.arange(self.room, device=token.device)
        mask = self.masked((index[: min(self.room, window or self.room)] > token)[None, None, None])
        held = next((layer for layer in self.shared.values() if _window(layer) == window), None)
        if window is None or held is None:
            return padding, mask
        size = _states(held)[0].size(2)
        padding = None if padding is None else padding[..., padding.size(-1) - size :]
        if size + self.room <= window:
            return padding, mask
        left = self.masked((torch.arange(size, device=token.device) <= token + (size - window))[None, None, None])
        return left if padding is None else padding + left, mask

    def grow(self, cache: Cache, room: int) -> None:
        """Makes room for so many tokens of each completion in a cache."""
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
        Attention `(B, 1, heads, head_dim)` of queries `(B, heads, 1, head_dim)` to keys and values of completions, and
        to those of their prompts: once for all queries of a prompt, merged by log-sum-exp.
        """
        index = cast(int, module.layer_idx)
        if index not in self.shared:  # an earlier layer of its type has its keys
            kinds = cast(PreTrainedConfig, module.config).layer_types
            index = max(i for i in self.shared if kinds[i] == kinds[index])
        layer = self.shared[index]
        prompt_key, prompt_value = _states(layer)
        padding, mask, window = self.padding, self.mask, _window(layer)
        if self.room:
            padding, mask = self._masks[window]
        elif window is not None:
            first = max(prompt_key.size(2) + key.size(2) - window, 0)
            prompt_key, prompt_value = prompt_key[:, :, first:], prompt_value[:, :, first:]
            padding = None if padding is None else padding[..., padding.size(-1) - prompt_key.size(2) :]
        query = query.to(value.dtype)
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        how = query.size(-1) ** -0.5 if scaling is None else scaling, options.get("softcap")
        if mask is not None and (more := key.size(2) - mask.size(-1)):  # in the first layer of a token
            mask = self.mask = F.pad(mask, (0, more))
        output, lse = kernels.attention_with_lse(query, key, value, mask, *how, 0 if self.room else -1)
        if sinks is not None:
            sinks = sinks.view(1, -1, 1)
            output = output * (lse - sinks).sigmoid()[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, sinks)
        if prompt_key.size(2):
            if (expand := getattr(module, "expand_kv", None)) is not None:  # of latents, which caches hold
                prompt_key, prompt_value = expand(prompt_key, prompt_value)
            query, merged, lse = (_by_prompt(each, len(prompt_key)) for each in (query, output, lse))
            other, other_lse = kernels.attention_with_lse(query, prompt_key, prompt_value, padding, *how, -1)
            merged.lerp_(other, (other_lse - lse).sigmoid()[..., None].to(other.dtype))
        return output.transpose(1, 2)


def set_lengths(cache: Cache, n: int) -> None:
    """Tells a cache, whose shapes stay, that it has `n` tokens of each completion."""
    for layer in cache.layers:
        if isinstance(layer, CompletionLayer):
            layer.n = n


def _window(layer: DynamicLayer) -> int | None:
    """Attention window of a cache layer."""
    return getattr(layer, "sliding_window", None)


def _by_prompt(states: torch.Tensor, n: int) -> torch.Tensor:
    """A view of `(n * G, heads, 1, ...)` as `(n, heads, G, ...)`, by one operation."""
    size, (batch, heads, _, *strides) = len(states) // n, states.stride()
    return states.as_strided((n, states.size(1), size, *states.shape[3:]), (size * batch, heads, batch, *strides))


def share_prompts(cache: DynamicCache, mask: torch.Tensor, n_rows: int, room: int = 0) -> Decoding:
    """
    Makes a cache of prompts, whose tokens are where `mask` `(N, P)` is 1, one of `n_rows` completions, as many for
    each, and returns what these share. Layers with states get one for each completion.
    """
    windows = {getattr(layer, "sliding_window", None) for layer in cache.layers}
    copied = not room and windows == {None} and (mask.size(1) <= SHORT_PROMPT or len(mask) == n_rows)
    layout, n = Decoding({}, room=room), mask.size(1) if copied else 0
    if room:  # which all masks need
        layout.slots[None] = torch.full((1,), -1, device=mask.device)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            index = torch.arange(n_rows, device=mask.device) // (n_rows // len(mask))
            layer.reorder_cache(cast(torch.LongTensor, index))
        elif isinstance(layer, DynamicLayer):
            slot = layout.slots.setdefault(_window(layer), torch.full((1,), n - 1, device=mask.device))
            layout.shared[i], cache.layers[i] = layer, CompletionLayer(layer, n_rows, slot, room, n)
    if not mask.all():
        padding = layout.masked(mask[:, None, None] == 0)
        if copied:
            layout.mask = padding.repeat_interleave(n_rows // len(mask), 0)
        else:
            layout.padding = padding
    return layout
