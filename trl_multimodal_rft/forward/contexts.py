# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions whose contexts were rewritten, as one row for each context, and their scores as one row again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..encoding.prompts import EncodedPrompt
from .layout import to_device


@dataclass(eq=False)
class ContextRows:
    """`N` completions of at most `C` tokens as `M` rows, one for each context, of at most `L` tokens."""

    prompts: list[EncodedPrompt]  # the context of each row
    completions: list[int]  # the batch index of each row's completion
    _cut: torch.Tensor  # (M, L), where a row's tokens are among all of the completions, and behind them for none
    _joined: torch.Tensor  # (N, C), the reverse

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the completions' tokens, `(N, C, ...)`, as those of the rows', `(M, L, ...)`, 0 on padding."""
        return _values_at(values, self._cut)

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of [`cut`]."""
        return _values_at(values, self._joined)

    def rows_of(self, completions: Sequence[int]) -> list[int]:
        """The rows of some completions."""
        chosen = {*completions}
        return [row for row, completion in enumerate(self.completions) if completion in chosen]


def context_rows(prompts: Sequence[EncodedPrompt], width: int, device: torch.device) -> ContextRows | None:
    """Rows of completions that are padded to a `width`; `None` if all follow their prompts."""
    lengths = [prompt.lengths_behind(width) for prompt in prompts]
    completions = [i for i, each in enumerate(lengths) for _ in each]
    if len(completions) == len(prompts):
        return None
    n_rows, longest = len(completions), max(map(max, lengths))
    cut = torch.full((n_rows, longest), len(prompts) * width)
    joined = torch.full((len(prompts), width), n_rows * longest)
    start = row = 0
    for i, each in enumerate(lengths):
        start = 0
        for length in each:
            cut[row, :length] = torch.arange(length) + i * width + start
            joined[i, start : start + length] = torch.arange(length) + row * longest
            start, row = start + length, row + 1
    contexts = [context for prompt in prompts for context in prompt.contexts]
    return ContextRows(contexts, completions, to_device(cut, device), to_device(joined, device))


def by_context(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> tuple[list[EncodedPrompt], list[int]]:
    """Contexts of completions, and how many tokens follow each, given the lengths of the completions."""
    pairs = [
        pair
        for prompt, n in zip(prompts, lengths, strict=True)
        for pair in zip(prompt.contexts, prompt.lengths_behind(n), strict=True)
    ]
    return [context for context, _ in pairs], [n for _, n in pairs]


def _values_at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    flat = values.flatten(0, 1)
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[index]
