# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention masks of a prompt and of text after it, in layers of one type."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Causal:
    """
    Attention of a prompt and of text after it, in which tokens see the last `window` tokens up to themselves (`None`:
    all).

    With a `prompt` `(P, 2)`, each token of the prompt sees a span of the prompt instead. A row of `prompt` holds the
    start of a token's span, and the index after its end. Unless `lookahead` is `None`, spans start within the window
    and reach at most `lookahead` tokens ahead. If a token sees tokens with gaps between them, `prompt` is a boolean
    mask `(P, P)`.
    """

    window: int | None = None
    prompt: torch.Tensor | None = None
    lookahead: int | None = 0


# Attention of a prompt and of text after it in layers of one type. `None` stands for plain causal attention. A tensor
# `(T, 2)` holds the start of the span that a token sees, and the index after the span's end. If a token sees tokens
# with gaps between them, the tensor is a boolean mask `(T, T)`.
LayerMask = torch.Tensor | Causal | None


def span_mask(spans: torch.Tensor, n: int) -> torch.Tensor:
    """
    Returns the boolean mask `(R, n)` over the first `n` tokens. `spans` `(R, 2)` holds the starts of spans and the
    indices after their ends, or rows of a boolean mask.
    """
    if spans.dtype == torch.bool:
        return spans[:, :n]
    positions = torch.arange(n, device=spans.device)
    return (positions >= spans[:, :1]) & (positions < spans[:, 1:])
