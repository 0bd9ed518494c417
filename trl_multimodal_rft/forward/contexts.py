# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions whose contexts were rewritten, as one row for each context, and their scores as one row again."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ..encoding.prompts import EncodedPrompt


@dataclass(eq=False)
class ContextRows:
    """`N` completions of at most `C` tokens as `M` rows, one for each context, of at most `L` tokens."""

    prompts: list[EncodedPrompt]  # the context of each row
    lengths: list[list[int]]  # of each completion, how many of its tokens follow each context
    width: int  # C

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the completions' tokens, `(N, C, ...)`, as those of the rows', `(M, L, ...)`, 0 on padding."""
        parts = [row[: sum(own)].split(own) for row, own in zip(values, self.lengths, strict=True)]
        return pad_sequence([part for own in parts for part in own], batch_first=True)

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of [`cut`]."""
        parts = [row[:n] for row, n in zip(values, chain.from_iterable(self.lengths), strict=True)]
        rows = pad_sequence([*torch.cat(parts).split([*map(sum, self.lengths)])], batch_first=True)
        return F.pad(rows, (*(0, 0) * (rows.dim() - 2), 0, self.width - rows.size(1)))

    def rows_of(self, chosen: set[int]) -> list[int]:
        """The rows of some completions, by their batch indices."""
        completions = [i for i, own in enumerate(self.lengths) for _ in own]
        return [row for row, i in enumerate(completions) if i in chosen]


def context_rows(prompts: Sequence[EncodedPrompt], width: int) -> ContextRows | None:
    """Rows of completions that are padded to a `width`; `None` if all follow their prompts."""
    contexts = [context for prompt in prompts for context in prompt.contexts]
    behind = [prompt.lengths_behind(width) for prompt in prompts]
    return None if len(contexts) == len(prompts) else ContextRows(contexts, behind, width)


def by_context(prompts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> tuple[list[EncodedPrompt], list[int]]:
    """Contexts of completions, and how many tokens follow each, given the lengths of the completions."""
    behind = [prompt.lengths_behind(n) for prompt, n in zip(prompts, lengths, strict=True)]
    return [context for prompt in prompts for context in prompt.contexts], [n for own in behind for n in own]
