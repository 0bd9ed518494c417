# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A cache of keys and values in which decoding copies nothing."""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


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


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache of a config, in which layers of full attention grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
