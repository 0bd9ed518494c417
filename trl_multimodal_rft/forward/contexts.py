# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions whose contexts were rewritten, as one row for each context, and their scores as one row again."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

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
    contexts, lengths = by_context(prompts, [width] * len(prompts))
    if len(contexts) == len(prompts):
        return None
    completions = [i for i, prompt in enumerate(prompts) for _ in prompt.contexts]
    behind = [accumulate(prompt.lengths_behind(width), initial=i * width) for i, prompt in enumerate(prompts)]
    starts = [start for own in behind for start in [*own][:-1]]
    spans = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    cut = pad_sequence(spans, batch_first=True, padding_value=len(prompts) * width)
    joined = torch.full((len(prompts) * width + 1,), cut.numel())
    joined[cut.flatten()] = torch.arange(cut.numel())
    joined = joined[:-1].view(len(prompts), width)
    return ContextRows(contexts, completions, to_device(cut, device), to_device(joined, device))


def by_context(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> tuple[list[EncodedPrompt], list[int]]:
    """Contexts of completions, and how many tokens follow each, given the lengths of the completions."""
    behind = [prompt.lengths_behind(n) for prompt, n in zip(prompts, lengths, strict=True)]
    return [context for prompt in prompts for context in prompt.contexts], [n for own in behind for n in own]


def _values_at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    flat = values.flatten(0, 1)
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[index]
