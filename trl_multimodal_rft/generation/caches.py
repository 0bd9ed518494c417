# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Caches of keys and values in which decoding copies nothing, and completions share those of their prompts."""

from typing import cast

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..forward.decoding import Shared


# Tokens to make room for at a time
_ROOM = 128


class GrowingLayer(DynamicLayer):
    """A cache layer that writes a token into spare room, where `DynamicLayer` copies all tokens before it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self._rooms: list[torch.Tensor | None] = [None, None]
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self._append(0, self.keys, key_states), self._append(1, self.values, value_states)
        return self.keys, self.values

    def _append(self, index: int, held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        room, n = self._rooms[index], held.size(-2)
        end = n + states.size(-2)
        # What was reordered lies elsewhere
        if room is None or room.data_ptr() != held.data_ptr() or room.size(-2) < end:
            room = self._rooms[index] = held.new_empty(*held.shape[:-2], end + _ROOM, held.size(-1))
            room[..., :n, :] = held
        room[..., n:end, :] = states
        return room[..., :end, :]


class CompletionLayer(GrowingLayer):
    """
    A cache layer of `n_rows` completions, as many for each prompt, of which `prompts` has keys and values. With `room`
    for so many tokens, and the `offset` of the next, all room is returned: shapes don't change.
    """

    def __init__(self, prompts: DynamicLayer, n_rows: int, room: int = 0, offset: torch.Tensor | None = None):
        super().__init__()
        states = cast(tuple[torch.Tensor, torch.Tensor], (prompts.keys, prompts.values))
        self.lazy_initialization(*states)
        self.shared: Shared = *states, getattr(prompts, "sliding_window", None)
        self.is_sliding, self.prompts, self._offset = self.shared[2] is not None, prompts, offset
        self.keys, self.values = (each.new_zeros(n_rows, each.size(1), room, each.size(3)) for each in states)
        self._rooms: list[torch.Tensor | None] = [None, None]
        self._n = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._offset is None:
            self._n += key_states.size(-2)
            return super().update(key_states, value_states)
        for held, states in zip(self._written, (key_states, value_states), strict=True):
            held.index_copy_(2, self._offset, states)
        return self._written

    @property
    def _written(self) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(tuple[torch.Tensor, torch.Tensor], (self.keys, self.values))

    def _append(self, index: int, held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        room, (_, _, window) = self._rooms[index], self.shared
        if window is not None and room is not None and room.size(-2) == held.size(-2):
            held = held[..., -window:, :]  # no later token sees more
        return super()._append(index, held, states)

    def get_seq_length(self) -> int:
        return self.prompts.get_seq_length() + self._n

    def crop(self, tokens_to_remove: int) -> None:
        self._n += tokens_to_remove
        self.keys, self.values = (each[..., :tokens_to_remove, :] for each in self._written)

    def whole(self) -> GrowingLayer:
        """A layer with the prompt of each completion before it."""
        layer, n_rows = GrowingLayer(), len(self._written[0])
        key, value = (each.repeat_interleave(n_rows // len(each), dim=0) for each in self.shared[:2])
        layer.update(key, value)
        layer.update(*self._written)
        return layer


def takes_completions(cache: DynamicCache, has_room: bool) -> bool:
    """Whether completions can share what a cache holds of prompts, and have room in it."""
    kinds = {type(layer) for layer in cache.layers} - {LinearAttentionLayer}
    return bool(kinds) and kinds <= {GrowingLayer, *(() if has_room else (DynamicSlidingWindowLayer,))}


def share_prompts(
    cache: DynamicCache, n_rows: int, room: int = 0, offset: torch.Tensor | None = None
) -> dict[int, Shared]:
    """
    Makes a cache of prompts one of `n_rows` completions, as many for each, and returns what these share, by layer.
    Layers with states get one for each completion. `room` and `offset` are as in [`CompletionLayer`].
    """
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionLayer):
            cache.layers[i] = CompletionLayer(cast(DynamicLayer, layer), n_rows, room, offset)
    shared = {i: layer.shared for i, layer in enumerate(cache.layers) if isinstance(layer, CompletionLayer)}
    n = len(next(iter(shared.values()))[0])
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            index = torch.arange(n, device=layer.device).repeat_interleave(n_rows // n)
            layer.reorder_cache(cast(torch.LongTensor, index))
    return shared


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache of a config, in which layers of full attention grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
