# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Weights of tokens and completions by entropy and dependency on media, and the coefficient of the entropy bonus.

Tensors hold `N` completions of a batch, or `B` of a micro-batch, of up to `T` tokens.
"""

import math
from typing import Literal

import torch


# Largest weight of a token in `relevance_weights`, before weights are scaled to a mean of 1
_LARGEST_WEIGHT = 5.0

# Entropies that differ by less count as equal, since forwards of padded and packed rows round differently. In nats, or
# as a fraction of entropies above 1 nat.
_ROUNDING = 1e-5

# Largest minus smallest dependency of a batch, in nats, up to which all completions have the weight 1
_SMALLEST_SPREAD = 1e-6


def high_entropy_mask(
    entropies: torch.Tensor,
    mask: torch.Tensor,
    ratio: float,
    *,
    scope: Literal["batch", "sequence"] = "batch",
    renormalize: bool = False,
    rounding: Literal["up", "down"] = "up",
) -> torch.Tensor:
    r"""
    Returns token weights that are 0 except on a share of the tokens, those with the highest entropies, see
    [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939).

    Of $n$ valid tokens, exactly $\lceil \mathrm{ratio} \cdot n \rceil$ are kept, or with the rounding `"down"`
    $\lfloor \mathrm{ratio} \cdot n \rfloor$, but at least one. Of tokens with about equal entropies, the first are
    kept. For example, of the entropies `[1, 2, 2]`, the ratio 0.3 keeps only the second token.

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
            Whether kept tokens have the weight $n$ / (number of kept tokens) instead of 1. A mean over valid tokens
            then becomes a mean over kept tokens.
        rounding (`str`, *optional*, defaults to `"up"`):
            How the number of kept tokens becomes whole: `"up"`, or `"down"` as in LightRFT.

    Returns:
        `torch.Tensor`: Weight of each token, float32, shape `(N, T)`; 0 on tokens that aren't kept.
    """
    mask = mask.bool()
    shape = (1, -1) if scope == "batch" else mask.shape  # tokens of one row compete
    valid = mask.reshape(shape)
    ranked = torch.where(valid, entropies.detach().float().reshape(shape), -torch.inf)
    n_valid = valid.sum(1).tolist()
    numbers_to_keep = [min(max(_share(ratio, n, rounding), 1), n) for n in n_valid]
    n_kept = torch.tensor(numbers_to_keep, device=mask.device)[:, None]
    threshold = ranked.sort(dim=1, descending=True).values.gather(1, (n_kept - 1).clamp(min=0))
    is_tied = valid & ((ranked - threshold).abs() <= _ROUNDING * threshold.abs().clamp(min=1))
    is_higher = valid & (ranked > threshold) & ~is_tied
    # The first tied tokens fill the number up
    is_kept = is_higher | (is_tied & (is_tied.cumsum(1) <= n_kept - is_higher.sum(1, keepdim=True)))
    weight = is_kept.float()
    if renormalize:
        factors = [n / max(to_keep, 1) for n, to_keep in zip(n_valid, numbers_to_keep, strict=True)]
        weight = weight * torch.tensor(factors, device=mask.device)[:, None]
    return weight.reshape(mask.shape)


def _share(ratio: float, n: int, rounding: Literal["up", "down"]) -> int:
    if rounding == "down":
        return int(ratio * n)  # 28 for 0.29 of 100, whose product is just below 29, as in LightRFT
    # Without `round`, `ceil` would add a token if a product should be whole, but has a rounding error: 0.07 * 100 > 7
    return math.ceil(round(ratio * n, 6))


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float, min_coef: float, max_coef: float
) -> float:
    """
    Returns the next coefficient of the entropy bonus by TRL's rule: the coefficient rises by `step` while `entropy` is
    at most `target`, and falls by `step` otherwise. `entropy` is the mean over an optimizer step's tokens, in nats.
    """
    return min(coef + step, max_coef) if entropy <= target else max(coef - step, min_coef)


def advantage_weights(dependency: torch.Tensor, is_weighted: torch.Tensor, min_weight: float) -> torch.Tensor:
    """
    Returns weights `(N,)` of advantages, see [VPPO](https://huggingface.co/papers/2510.09285): linear in the mean
    `dependency` `(N,)` of a completion's tokens on its media, `min_weight` for the least, with a mean of 1.
    Completions that aren't `is_weighted` have weight 1.
    """
    weights = torch.ones_like(dependency)
    dependencies = dependency[is_weighted]
    if not dependencies.numel():
        return weights
    spread = dependencies.max() - dependencies.min()
    if spread > _SMALLEST_SPREAD:
        normalized = (dependencies - dependencies.min()) / spread
        weights[is_weighted] = min_weight + (1 - min_weight) * normalized / normalized.mean()
    return weights


def relevance_weights(differences: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """
    Returns weights of tokens, the mask of [MAPO](https://huggingface.co/papers/2605.27741): a softmax over a
    completion's `differences` `(B, T)` of entropy without and with the media, at most 5, scaled to a mean of 1, and 0
    outside the mask.
    """
    mask = mask.bool()
    n_tokens = mask.sum(1, keepdim=True)
    # At least log 2, as a completion of one token would divide by log 1 = 0
    scores = differences.abs() / (temperature * n_tokens.clamp(min=2).log())
    weights = torch.where(mask, scores, -torch.inf).softmax(1).nan_to_num(nan=0.0) * n_tokens
    weights = weights.clamp(max=_LARGEST_WEIGHT)
    return weights * n_tokens / weights.sum(1, keepdim=True).clamp(min=1e-6)
