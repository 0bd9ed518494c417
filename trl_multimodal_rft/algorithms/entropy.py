# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Selection of tokens by the entropy of the policy, and the coefficient of the entropy bonus."""

import math
from collections.abc import Callable
from typing import Literal

import torch


def high_entropy_mask(
    entropies: torch.Tensor,
    mask: torch.Tensor,
    ratio: float,
    *,
    scope: Literal["batch", "sequence"] = "batch",
    renormalize: bool = False,
) -> torch.Tensor:
    r"""
    Keeps the share of tokens with the highest entropy, see
    [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939).

    Of `N` valid tokens exactly $\lceil \mathrm{ratio} \cdot N \rceil$ are kept; of equal ones, the first.

    Args:
        entropies (`torch.Tensor`):
            Entropy at each token, in nats, shape `(N, T)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        ratio (`float`):
            Share to keep, above 0.
        scope (`str`, *optional*, defaults to `"batch"`):
            Whether tokens compete within the whole `"batch"`, as in the paper, or within their `"sequence"`.
        renormalize (`bool`, *optional*, defaults to `False`):
            Whether kept tokens weigh valid over kept tokens instead of 1, so that a mean over valid tokens becomes one
            over kept tokens.

    Returns:
        `torch.Tensor`: Weight of each token, float32, shape `(N, T)`; 0 on tokens that aren't kept.
    """
    mask = mask.bool()
    rows = (1, -1) if scope == "batch" else mask.shape
    valid = mask.reshape(rows)
    ranked = torch.where(valid, entropies.detach().float().reshape(rows), -torch.inf)
    rank = ranked.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 for the highest
    counts = valid.sum(1).tolist()
    # `round` undoes what a float adds to a product that is whole, such as 0.7 * 10
    kept = [min(max(math.ceil(round(ratio * count, 6)), 1), count) for count in counts]
    keep = valid & (rank < torch.tensor(kept, device=mask.device)[:, None])
    weight = keep.float()
    if renormalize:
        factors = [count / max(k, 1) for count, k in zip(counts, kept, strict=True)]
        weight = weight * torch.tensor(factors, device=mask.device)[:, None]
    return weight.reshape(mask.shape)


def high_entropy_weights(
    entropies: torch.Tensor,
    mask: torch.Tensor,
    ratio: float,
    *,
    scope: Literal["batch", "sequence", "micro_batch"],
    renormalize: bool,
    gather: Callable[[torch.Tensor], torch.Tensor],
    rank: int,
) -> torch.Tensor:
    """
    [`high_entropy_mask`] over all ranks, which hold equally many rows; every `scope` but `"sequence"` is all rows.

    `gather` turns rows of this rank into those of all ranks, padded on the right; `rank` is this one's index. Shapes:
    `entropies`, `mask` `(N, T)`; returns weights `(N, T)` of this rank's tokens.
    """
    if scope == "sequence":
        return high_entropy_mask(entropies, mask, ratio, scope="sequence", renormalize=renormalize)
    weights = high_entropy_mask(gather(entropies.detach()), gather(mask), ratio, renormalize=renormalize)
    return weights[rank * len(mask) : (rank + 1) * len(mask), : mask.size(1)]


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float, smallest: float, largest: float
) -> float:
    """
    TRL's rule for the coefficient of the entropy bonus: it rises while the mean entropy of the tokens of an optimizer
    step, in nats, is at most its target, and falls otherwise.
    """
    return min(coef + step, largest) if entropy <= target else max(coef - step, smallest)
