# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention masks of a prompt and of text after it, in layers of one type."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Causal:
    """
    Attention of a prompt and of text after it, in which a token sees the last `window` tokens, itself included
    (`None`: all).

    With a `prompt` `(P, 2)`, a token of the prompt sees a span of the prompt instead: from the first number of its row
    to before the second. For example, a prompt of 4 tokens, in which tokens 1 and 2 are an image that sees itself, has
    the rows `[0, 1], [0, 3], [0, 3], [0, 4]` and a `lookahead` of 1. With a `lookahead`, spans start within the
    window, and end at most `lookahead` tokens after the token. If `lookahead` is `None`, spans are arbitrary.

    If a token of the prompt sees tokens with gaps between them, `prompt` is a boolean mask `(P, P)`.
    """

    window: int | None = None
    prompt: torch.Tensor | None = None
    lookahead: int | None = 0


# Attention of a prompt and of text after it, `T` tokens, in layers of one type. `None` is plain causal attention. A
# tensor `(T, 2)` holds the spans that tokens see, as in `Causal.prompt`. If a token sees tokens with gaps between
# them, the tensor is a boolean mask `(T, T)`.
LayerMask = torch.Tensor | Causal | None


def span_mask(spans: torch.Tensor, n: int) -> torch.Tensor:
    """
    Returns the boolean mask `(R, n)` of `R` tokens over the first `n` tokens. `spans` `(R, 2)` holds the starts of
    spans and the indices after their ends. A boolean mask is cut to `n` columns.
    """
    if spans.dtype == torch.bool:
        return spans[:, :n]
    positions = torch.arange(n, device=spans.device)
    return (positions >= spans[:, :1]) & (positions < spans[:, 1:])
