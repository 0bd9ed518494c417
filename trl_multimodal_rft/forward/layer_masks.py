# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention masks of a prompt and of text after it, in layers of one type."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Causal:
    """
    Attention in which a token sees the last `window` tokens (`None`: all), itself included. A token of a `prompt` `(P,
    2)` sees the span from its row's first number to before the second, up to `lookahead` (`None`: any) tokens after
    it; with gaps, `prompt` is a boolean mask `(P, P)`.
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
