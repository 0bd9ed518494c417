# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A cache of keys and values in which completions share those of their prompts, and decoding copies nothing."""

from typing import cast

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from .decoding import MASKED, Decoding


# Tokens to make room for at a time
_ROOM = 128


class CompletionLayer(DynamicLayer):
    """
    A cache layer with the `n` tokens of each completion, behind the prompts that `prompts` has: at `slot`, from where
    a window starts anew. Room is made as needed, or for all tokens, which are returned then: shapes don't change.
    """

    def __init__(self, prompts: DynamicLayer, n_rows: int, slot: torch.Tensor, room: int):
        super().__init__()
        states = cast(tuple[torch.Tensor, torch.Tensor], (prompts.keys, prompts.values))
        self.lazy_initialization(*states)
        self.prompts, self.window, self.n = prompts, getattr(prompts, "sliding_window", None), 0
        self._slot, self._is_static = slot, room > 0
        self.keys, self.values = (each.new_zeros(n_rows, each.size(1), room, each.size(3)) for each in states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: int, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = cast(tuple[torch.Tensor, torch.Tensor], (self.keys, self.values))
        if not self._is_static:
            self.n += 1
            if (size := keys.size(2)) < min(self.n, self.window or self.n):
                device = keys.device.type
                dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else keys.dtype
                more = (0, 0, 0, min(_ROOM, (self.window or size + _ROOM) - size))
                keys, values = self.keys, self.values = [F.pad(each.to(dtype), more) for each in (keys, values)]
        keys.index_copy_(2, self._slot, key_states.to(keys.dtype))
        values.index_copy_(2, self._slot, value_states.to(values.dtype))
        return (keys, values) if self._is_static else (keys[:, :, : self.n], values[:, :, : self.n])

    def get_seq_length(self) -> int:
        return self.prompts.get_seq_length() + self.n

    def crop(self, tokens_to_remove: int) -> None:
        self.n += tokens_to_remove

    def whole(self) -> DynamicLayer:
        """Makes the layer of prompts one of completions, with the prompt of each before it."""
        keys, values = cast(tuple[torch.Tensor, torch.Tensor], (self.keys, self.values))
        self.prompts.batch_repeat_interleave(len(keys) // len(cast(torch.Tensor, self.prompts.keys)))
        self.prompts.update(keys[:, :, : self.n], values[:, :, : self.n])
        return self.prompts


def share_prompts(cache: DynamicCache, mask: torch.Tensor, n_rows: int, room: int = 0) -> Decoding:
    """
    Makes a cache of prompts, whose tokens are where `mask` `(N, P)` is 1, one of `n_rows` completions, as many for
    each, and returns what these share. Layers with states get one for each completion.
    """
    padding = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, MASKED)[:, None, None]
    layout = Decoding({}, None if bool(mask.all()) else padding, room)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            index = torch.arange(n_rows, device=mask.device) // (n_rows // len(mask))
            layer.reorder_cache(cast(torch.LongTensor, index))
            continue
        prompts, window = cast(DynamicLayer, layer), getattr(layer, "sliding_window", None)
        slot = layout.slots.setdefault(window, torch.full((1,), -1, device=mask.device))
        cache.layers[i] = CompletionLayer(prompts, n_rows, slot, room)
        layout.shared[i] = (*cast(tuple[torch.Tensor, torch.Tensor], (prompts.keys, prompts.values)), window)
    return layout
