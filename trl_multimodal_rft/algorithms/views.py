# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Terms and weights in the policy loss from a second view of the prompts, such as with masked images."""

import torch

from .kl import approx_kl


# Largest weight of a token in `relevance_weights`, before they are scaled to a mean of 1
_LARGEST_WEIGHT = 5.0

# Spread of dependencies, in nats, below which completions weigh the same
_SMALLEST_SPREAD = 1e-6


def view_term(
    logps: torch.Tensor,
    view_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_coef: float = 0.0,
    kl_clip: float | None = None,
    entropy_coefs: tuple[float, float] = (0.0, 0.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    The Implicit Perception Loss and the Double Entropy Loss of [PAPO](https://huggingface.co/papers/2507.06448),
    $-\gamma \min(k_3, c) - \eta_1 \log \pi - \eta_2 \log \tilde\pi$, where $k_3$ estimates
    $\mathrm{KL}(\pi \| \tilde\pi)$ of the policy on the clean prompt from the policy under the view. Both have
    gradients. Entropies are estimated from sampled tokens, as in the paper.

    Args:
        logps, view_logps (`torch.Tensor`):
            Log-probabilities of completions after the clean prompt, and after its view, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            $\gamma$.
        kl_clip (`float`, *optional*):
            $c$, the divergence of a token in nats from which on it isn't raised further.
        entropy_coefs (`tuple[float, float]`, *optional*, defaults to `(0.0, 0.0)`):
            $\eta_1$ and $\eta_2$.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The loss of each token, and the divergence, shape `(B, T)`.
    """
    kl = approx_kl(logps, view_logps, mask, "k3")
    clean, view = entropy_coefs
    return -kl_coef * kl.clamp(max=kl_clip) - clean * logps - view * view_logps, kl


def advantage_weights(dependency: torch.Tensor, counts: torch.Tensor, smallest: float) -> torch.Tensor:
    r"""
    Weights of advantages by how far completions depend on their media: $\beta_\mathrm{min}$ for the least dependent
    one of a batch, and linear in the dependency, so that their mean is 1, see
    [VPPO](https://huggingface.co/papers/2510.09285).

    Args:
        dependency (`torch.Tensor`):
            Mean dependency of the tokens of each completion, shape `(N,)`.
        counts (`torch.Tensor`):
            Whether a completion is weighed, shape `(N,)`. The others, such as those without media, weigh 1.
        smallest (`float`):
            $\beta_\mathrm{min}$, between 0 and 1.

    Returns:
        `torch.Tensor`: The weights, shape `(N,)`.
    """
    weights = torch.ones_like(dependency)
    among = dependency[counts]
    if among.numel() and (spread := among.max() - among.min()) > _SMALLEST_SPREAD:
        normalized = (among - among.min()) / spread
        weights[counts] = smallest + (1 - smallest) * normalized / normalized.mean()
    return weights


def relevance_weights(differences: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    r"""
    Weights of tokens by how far their entropy depends on the media, the modality relevance mask of
    [MAPO](https://huggingface.co/papers/2605.27741): $T \mathrm{softmax}_t(|\Delta h_t| / (\tau \log T))$ over the $T$
    tokens of a completion, at most 5, and scaled to a mean of 1.

    Args:
        differences (`torch.Tensor`):
            $\Delta h_t$, the entropy without the media minus the one with them, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        temperature (`float`):
            $\tau$, above 0.

    Returns:
        `torch.Tensor`: The weights, shape `(B, T)`, 0 outside the mask.
    """
    mask = mask.bool()
    counts = mask.sum(1, keepdim=True)
    scores = differences.abs() / (temperature * counts.clamp(min=2).log())
    weights = torch.where(mask, scores, -torch.inf).softmax(1).nan_to_num(nan=0.0) * counts
    weights = weights.clamp(max=_LARGEST_WEIGHT)
    return weights * counts / weights.sum(1, keepdim=True).clamp(min=1e-6)
