# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the tokens of a prompt, and of text behind it, attend to in layers of one type."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Causal:
    """
    Attention of a prompt and of text behind it: each token sees the last `window` tokens up to itself (`None`: all),
    and the prompt's tokens those from the first to before the second position in `prompt` `(P, 2)`, if there is one:
    none before the window, and none more than `lookahead` tokens later (`None`: any). Where these have gaps, `prompt`
    is a boolean mask `(P, P)`.
    """

    window: int | None = None
    prompt: torch.Tensor | None = None
    lookahead: int | None = 0


# Attention of a prompt and of text behind it in layers of one type: for each token, the first that it sees and the one
# behind the last, `(T, 2)`, a boolean mask where it doesn't see all between, or `None` for plain causal
LayerMask = torch.Tensor | Causal | None


def span_mask(spans: torch.Tensor, n: int) -> torch.Tensor:
    """
    Which of the first `n` tokens are within spans from a first token to before an end, `(R, 2)`, or are marked in rows
    of a boolean mask: `(R, n)`.
    """
    if spans.dtype == torch.bool:
        return spans[:, :n]
    positions = torch.arange(n, device=spans.device)
    return (positions >= spans[:, :1]) & (positions < spans[:, 1:])
