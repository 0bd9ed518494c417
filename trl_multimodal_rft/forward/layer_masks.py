# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention masks of a prompt and of text behind it, in layers of one type."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Causal:
    """
    Attention of a prompt and of text behind it, in which tokens see the last `window` tokens up to themselves (`None`:
    all). With a `prompt` `(P, 2)`, tokens of the prompt see instead the tokens from the first position in it to before
    the second: none before the window and none more than `lookahead` tokens later, unless `lookahead` is `None`. Where
    the tokens that they see have gaps, `prompt` is a boolean mask `(P, P)`.
    """

    window: int | None = None
    prompt: torch.Tensor | None = None
    lookahead: int | None = 0


# Attention of a prompt and of text behind it in layers of one type: spans `(T, 2)` from the first token that a token
# sees to before an end; a boolean mask `(T, T)` if a token doesn't see all tokens between; or `None` for plain causal
LayerMask = torch.Tensor | Causal | None


def span_mask(spans: torch.Tensor, n: int) -> torch.Tensor:
    """
    Returns the boolean mask `(R, n)` of the first `n` tokens that are within spans `(R, 2)` from a first token to
    before an end. Spans may also be rows of a boolean mask already.
    """
    if spans.dtype == torch.bool:
        return spans[:, :n]
    positions = torch.arange(n, device=spans.device)
    return (positions >= spans[:, :1]) & (positions < spans[:, 1:])
