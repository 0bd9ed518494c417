# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions while they are decoded, a token at a time: their cache, and attention to prompts that it holds once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from . import kernels
from .kernels import AttentionOptions


# Tokens to make room for at a time, and layers
_ROOM, _LAYERS = 128, 16

# Added to scores of what isn't attended to, in any dtype; where that is all, all are equal
_MASKED = -3e4


def _states(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of an initialized layer."""
    return cast(tuple[torch.Tensor, torch.Tensor], (layer.keys, layer.values))


class CompletionLayer(DynamicLayer):
    """
    A cache layer with the `n` tokens of each completion, behind the prompts that `prompts` has: views of what [`Room`]
    holds. The next token goes to `slots`, or, where shapes don't change, to the `slot` of all that there is room for.
    """

    def __init__(self, prompts: DynamicLayer, slot: torch.Tensor | None):
        super().__init__()
        keys, values = _states(prompts)
        states = prompts.keys, _ = keys.to(values.dtype), values  # under autocast, rotary embeddings are in float32
        self.lazy_initialization(*states)
        self.prompts, self.n, self.slot, self.slots = prompts, 0, slot, [*states]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _states(self)
        if self.slot is None:
            self.n += 1
            torch._foreach_copy_(self.slots, [key_states, value_states])
        else:
            keys.index_copy_(2, self.slot, key_states.to(keys.dtype))
            values.index_copy_(2, self.slot, value_states.to(values.dtype))
        return keys, values

    def get_seq_length(self) -> int:
        return self.prompts.get_seq_length() + self.n

    def crop(self, tokens_to_remove: int) -> None:
        self.n += tokens_to_remove

    def whole(self) -> DynamicLayer:
        """Makes the layer of prompts one of completions, with the prompt of each before it."""
        keys, values = _states(self)
        self.prompts.batch_repeat_interleave(len(keys) // len(_states(self.prompts)[0]))
        self.prompts.update(keys[:, :, : self.n], values[:, :, : self.n])
        return self.prompts


class Room:
    """
    The keys, or the values, of completions in `layers` of one shape and window, from where it starts anew. They are
    one behind the other `(B, heads, layers * size, head_dim)`, so that one operation makes the views of all.
    """

    def __init__(self, layers: Sequence[CompletionLayer], is_value: bool, n_rows: int):
        self.layers, self.is_value, self.size = layers, is_value, 0
        self.window = cast(int | None, getattr(layers[0].prompts, "sliding_window", None))
        states = _states(layers[0].prompts)[is_value]
        self._hold(states.new_zeros(n_rows, states.size(1), 0, states.size(3)))

    def _hold(self, states: torch.Tensor) -> None:
        self.states, self._slots = states, states.split(1, 2)

    def advance(self, n: int) -> None:
        """Shows `n` tokens to the layers, of which they write the last."""
        window = self.window or n
        if self.size < (held := min(n, window)):
            states = self.states.unflatten(2, (len(self.layers), self.size))
            more = max(held - self.size, min(_ROOM, (self.window or self.size + _ROOM) - self.size))
            self.size += more
            self._hold(F.pad(states, (0, 0, 0, more)).flatten(2, 3))
        views = self.states.split([held, self.size - held] * len(self.layers), 2)[::2]
        for i, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            setattr(layer, "values" if self.is_value else "keys", view)
            layer.slots[self.is_value] = self._slots[i * self.size + (n - 1) % window]

    def reorder_cache(self, index: torch.Tensor) -> None:
        """Goes on with the rows at an index."""
        self._hold(self.states.index_select(0, index))


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
            How many tokens of a completion the cache returns, if shapes must not change.
    """

    shared: dict[int, DynamicLayer]
    padding: torch.Tensor | None = None
    room: int = 0
    rooms: list[Room] = field(default_factory=list, init=False)
    carried: list[LinearAttentionLayer] = field(default_factory=list, init=False)  # layers with states
    # Of a cache whose shapes don't change: where it has the token `(1,)`, and what is added to scores
    slot: torch.Tensor | None = field(default=None, init=False)
    _unwritten: torch.Tensor | None = field(default=None, init=False)
    # By shape, what attention to prompts is merged in, which the layer's projection reads before another layer writes
    _merged: dict[torch.Size, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False)

    @property
    def n_prompts(self) -> int:
        """How many prompts are shared."""
        return len(_states(next(iter(self.shared.values())))[0])

    def masked(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to scores where `hidden` is true, in the dtype of values, so that no layer casts it."""
        return hidden.to(_states(next(iter(self.shared.values())))[1].dtype) * _MASKED

    def advance(self) -> None:
        """Goes to the next token, which the next forward writes."""
        for room in self.rooms:
            room.advance(self.room or room.layers[0].n + 1)
        if self.slot is not None:
            later = torch.arange(self.room, device=self.slot.device) > self.slot.add_(1)
            self._unwritten = self.masked(later[None, None, None])

    def reorder_cache(self, index: torch.Tensor) -> None:
        """Goes on with the rows at an index, before the next token's forward. Fixed shapes keep theirs."""
        for each in (*self.rooms, *self.carried):
            each.reorder_cache(cast(torch.LongTensor, index))
        self.advance()

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
        padding, window = self.padding, getattr(layer, "sliding_window", None)
        if window is not None:
            first = max(prompt_key.size(2) + key.size(2) - window, 0)
            prompt_key, prompt_value = prompt_key[:, :, first:], prompt_value[:, :, first:]
            padding = None if padding is None else padding[..., padding.size(-1) - prompt_key.size(2) :]
        if (expand := getattr(module, "expand_kv", None)) is not None:  # of latents, which caches hold
            prompt_key, prompt_value = expand(prompt_key, prompt_value)
        query = query.to(value.dtype)
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        how = query.size(-1) ** -0.5 if scaling is None else scaling, options.get("softcap")
        output, lse = kernels.attention_with_lse(query, key, value, self._unwritten, *how)
        if sinks is not None:
            sinks = sinks.view(1, -1, 1)
            output = output * (lse - sinks).sigmoid()[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, sinks)
        if not prompt_key.size(2):
            return output.transpose(1, 2)
        query, own, lse = (_by_prompt(each, len(prompt_key)) for each in (query, output, lse))
        other, other_lse = kernels.attention_with_lse(query, prompt_key, prompt_value, padding, *how)
        if torch.compiler.is_compiling():
            own.lerp_(other, (other_lse - lse).sigmoid()[..., None].to(other.dtype))
            return output.transpose(1, 2)
        if output.shape not in self._merged:  # what no operation needs to make for each layer and token
            merged, share = output.new_empty(len(output), 1, *output.shape[1::2]), output.new_empty(lse.shape)
            views = _by_prompt(merged.transpose(1, 2), len(prompt_key)), share[..., None]
            self._merged[output.shape] = merged, share, *views
        merged, share, by_prompt, weight = self._merged[output.shape]
        torch.sigmoid(other_lse - lse, out=share)
        torch.lerp(own, other, weight, out=by_prompt)
        return merged


def _by_prompt(states: torch.Tensor, n: int) -> torch.Tensor:
    """A view of `(n * G, heads, 1, ...)` as `(n, heads, G, ...)`, by one operation."""
    size, (batch, heads, _, *strides) = len(states) // n, states.stride()
    return states.as_strided((n, states.size(1), size, *states.shape[3:]), (size * batch, heads, batch, *strides))


def share_prompts(cache: DynamicCache, mask: torch.Tensor, n_rows: int, room: int = 0) -> Decoding:
    """
    Makes a cache of prompts, whose tokens are where `mask` `(N, P)` is 1, one of `n_rows` completions, as many for
    each, and returns what these share. Layers with states get one for each completion.
    """
    layout, shapes = Decoding({}, room=room), dict[tuple, list[CompletionLayer]]()
    layout.slot = torch.full((1,), -1, device=mask.device) if room else None
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            index = torch.arange(n_rows, device=mask.device) // (n_rows // len(mask))
            layer.reorder_cache(cast(torch.LongTensor, index))
            layout.carried.append(layer)
        elif isinstance(layer, DynamicLayer):
            layout.shared[i], cache.layers[i] = layer, (own := CompletionLayer(layer, layout.slot))
            keys, values = _states(layer)
            shape = getattr(layer, "sliding_window", None), keys.shape[1::2], values.shape[1::2], values.dtype
            shapes.setdefault(shape, []).append(own)
    for layers in shapes.values():
        for i in range(0, len(layers), _LAYERS):
            layout.rooms += [Room(layers[i : i + _LAYERS], is_value, n_rows) for is_value in (False, True)]
    if not mask.all():
        layout.padding = layout.masked(mask[:, None, None] == 0)
    layout.advance()
    return layout
