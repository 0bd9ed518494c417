# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention of completions while they are decoded, a token at a time, to prompts that are held once."""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from . import kernels
from .kernels import AttentionOptions


# Of a layer: keys and values of prompts `(N, heads, P, head_dim)`, and its attention window, if it has one
Shared = tuple[torch.Tensor, torch.Tensor, int | None]

# Added to scores of what isn't attended to, in any dtype; where that is all, all are equal
MASKED = -3e4


@dataclass
class Decoding:
    """
    What the next token of each completion attends to: its prompt, and what the cache holds.

    Args:
        shared (`dict[int, tuple]`):
            What completions share, by layer. Those of a prompt follow each other, as many for each.
        padding (`torch.Tensor`, *optional*):
            What is added to scores of prompts, `(N, 1, 1, P)`.
        room (`int`, *optional*):
            How many tokens of a completion the cache returns, if shapes must not change.
        slots (`dict[int | None, torch.Tensor]`, *optional*):
            By attention window, where the cache has the token `(1,)`.
    """

    shared: dict[int, Shared]
    padding: torch.Tensor | None = None
    room: int = 0
    slots: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self._unwritten: torch.Tensor | None = None  # what is added to scores of a cache with room

    @property
    def n_prompts(self) -> int:
        """How many prompts are shared."""
        return len(next(iter(self.shared.values()))[0])

    def advance(self) -> None:
        """Goes to the next token, before its forward."""
        for window, slot in self.slots.items():
            slot.add_(1)
            if window is not None:
                slot.remainder_(window)
        if self.room:
            later = torch.arange(self.room, device=self.slots[None].device) > self.slots[None]
            self._unwritten = torch.zeros(1, 1, 1, self.room, device=later.device).masked_fill(later, MASKED)

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
        layer = cast(int, module.layer_idx)
        device, (prompt_key, prompt_value, window) = query.device.type, self.shared[layer]
        if torch.is_autocast_enabled(device):  # rotary embeddings mix float32 and half precision
            states = (query, key, value, prompt_key, prompt_value)
            query, key, value, prompt_key, prompt_value = (
                each.to(torch.get_autocast_dtype(device)) for each in states
            )
            self.shared[layer] = prompt_key, prompt_value, window  # not cast again
        padding, seen = self.padding, prompt_key.size(2)
        if window is not None:
            seen = min(seen, max(window - key.size(2), 0))
            prompt_key, prompt_value = (each[..., each.size(2) - seen :, :] for each in (prompt_key, prompt_value))
            padding = None if padding is None else padding[..., padding.size(-1) - seen :]
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        how = query.size(-1) ** -0.5 if scaling is None else scaling, options.get("softcap")
        output, lse = kernels.attention_with_lse(query, key, value, self._unwritten, *how)
        if sinks is not None:
            sinks = sinks.view(1, -1, 1)
            output = output * (lse - sinks).sigmoid()[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, sinks)
        if seen:
            groups = query.view(len(prompt_key), -1, query.size(1), query.size(-1)).transpose(1, 2)
            other, other_lse = kernels.attention_with_lse(groups, prompt_key, prompt_value, padding, *how)
            other, other_lse = other.transpose(1, 2), other_lse.transpose(1, 2)
            weight = (other_lse - lse.view(other_lse.shape)).sigmoid()[..., None].to(output.dtype)
            output = torch.lerp(output.view(other.shape), other, weight)
        return output.reshape(len(query), 1, query.size(1), -1)
