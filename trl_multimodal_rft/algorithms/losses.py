# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Policy losses that TRL doesn't have, and how losses are averaged.

Losses are to be minimised. `log_ratio` is the current minus the old log-probability of each token.
"""

import math
from typing import Literal

import torch


# Beyond this, the exponential overflows sooner or later, and its gradient becomes NaN
_LARGEST_LOG_RATIO = 20.0


def dual_clip_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, *, epsilon_low: float, epsilon_high: float, delta: float
) -> torch.Tensor:
    r"""
    PPO's clipped loss, bounded by $-\delta A$ where the advantage is negative, see
    [Dual-clip PPO](https://huggingface.co/papers/1912.09729).

    Without the bound, one token that became much likelier while its advantage is negative dominates the batch.

    Args:
        log_ratio (`torch.Tensor`):
            Log-ratios, shape `(B, T)`.
        advantages (`torch.Tensor`):
            Advantages, shape `(B, 1)` or `(B, T)`.
        epsilon_low (`float`):
            The ratio is clipped at `1 - epsilon_low`.
        epsilon_high (`float`):
            The ratio is clipped at `1 + epsilon_high`.
        delta (`float`):
            Bound of the ratio for negative advantages, above `1 + epsilon_high`; usually 3.

    Returns:
        `torch.Tensor`: Loss of each token, shape `(B, T)`.
    """
    ratio = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    return torch.where(advantages < 0, torch.min(loss, -delta * advantages), loss)


def cpgd_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, *, epsilon_low: float, epsilon_high: float
) -> torch.Tensor:
    r"""
    CPGD's policy gradient, clipped in the *log*-ratio, see [CPGD](https://huggingface.co/papers/2505.12504).

    The gradient weight of a token is its advantage inside the clip range and 0 beyond, never ratio times advantage. The
    paper adds the [`policy_drift`].

    Args:
        log_ratio (`torch.Tensor`):
            Log-ratios, shape `(B, T)`.
        advantages (`torch.Tensor`):
            Advantages, shape `(B, 1)` or `(B, T)`.
        epsilon_low (`float`):
            The log-ratio is clipped at `log(1 - epsilon_low)`.
        epsilon_high (`float`):
            The log-ratio is clipped at `log(1 + epsilon_high)`.

    Returns:
        `torch.Tensor`: Loss of each token, shape `(B, T)`.
    """
    clipped = log_ratio.clamp(math.log(1 - epsilon_low), math.log(1 + epsilon_high))
    return -torch.min(log_ratio * advantages, clipped * advantages)


def policy_drift(logps: torch.Tensor, old_logps: torch.Tensor, clamp: float) -> torch.Tensor:
    r"""
    CPGD's pull back towards the policy that sampled, see [CPGD](https://huggingface.co/papers/2505.12504).

    Its gradient is that of the k3 estimate of $\mathrm{KL}(\pi_\mathrm{old} \| \pi)$, $(r - 1) \nabla \log \pi$, whose
    weight is clamped so that no token dominates; its value means nothing.

    Args:
        logps (`torch.Tensor`):
            Current log-probabilities, shape `(B, T)`.
        old_logps (`torch.Tensor`):
            Log-probabilities under the policy that sampled, shape `(B, T)`.
        clamp (`float`):
            Largest weight $r - 1$.

    Returns:
        `torch.Tensor`: Drift of each token, shape `(B, T)`.
    """
    return ((logps.detach() - old_logps).exp() - 1).clamp(max=clamp) * logps


def gmpo_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> torch.Tensor:
    r"""
    GMPO: the geometric mean of a completion's ratios, clipped one-sidedly in log space, times its advantage, see
    [Geometric-Mean Policy Optimization](https://huggingface.co/papers/2507.20673).

    Args:
        log_ratio (`torch.Tensor`):
            Log-ratios, shape `(B, T)`.
        advantages (`torch.Tensor`):
            Advantages, shape `(B,)`.
        mask (`torch.Tensor`):
            Weight of each token in the geometric mean, shape `(B, T)`.
        epsilon_low (`float`):
            Log-ratios are clipped at `-epsilon_low` where the advantage is negative; the paper uses 0.4.
        epsilon_high (`float`):
            Log-ratios are clipped at `epsilon_high` where the advantage is positive; the paper uses 0.4.

    Returns:
        `torch.Tensor`: Loss of each completion, shape `(B,)`.
    """
    clipped = torch.where(
        advantages[:, None] > 0, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon_low)
    )
    mean = torch.where(mask.bool(), clipped * mask, 0).sum(1) / mask.sum(1).clamp(min=1)
    return -mean.clamp(max=_LARGEST_LOG_RATIO).exp() * advantages


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None = None
) -> torch.Tensor:
    r"""
    Half the squared error of the critic, clipped around its old values as in [PPO](https://huggingface.co/papers/1707.06347):
    $\frac{1}{2} \max((\mathrm{clip}(V, V_\mathrm{old} \pm \epsilon) - R)^2, (V - R)^2)$.

    Args:
        values (`torch.Tensor`):
            Current values, shape `(B, T)`.
        old_values (`torch.Tensor`):
            Values when the completions were sampled, shape `(B, T)`.
        returns (`torch.Tensor`):
            Returns, shape `(B, T)`.
        clip (`float`, *optional*):
            How far values may move from the old ones to be rewarded for it. `None` doesn't clip.

    Returns:
        `torch.Tensor`: Loss of each token, shape `(B, T)`.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (clipped - returns).square())
    return error / 2


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""
    How much of the returns the critic knows before: $1 - \mathrm{Var}(R - V) / \mathrm{Var}(R)$.

    Args:
        values (`torch.Tensor`):
            Values, shape `(B, T)`.
        returns (`torch.Tensor`):
            Returns, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.

    Returns:
        `torch.Tensor`: A scalar, at most 1; `NaN` if the returns are equal or there are fewer than two.
    """
    returns, errors = returns[mask.bool()].double(), (returns - values)[mask.bool()].double()
    if len(returns) < 2:
        return returns.new_full((), torch.nan)
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - errors.var(correction=0) / variance, torch.nan)


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"],
    denominator: torch.Tensor | float,
) -> torch.Tensor:
    r"""
    Sums the losses of a micro-batch so that the sum over micro-batches and ranks is the loss of the whole batch.

    A denominator of the whole batch makes the result independent of how the batch is split.

    Args:
        values (`torch.Tensor`):
            Loss of each token, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        mode (`str`):
            `"seq-mean-token-mean"`: $\sum_i \frac{1}{|o_i|} \sum_t x_{i,t}$ as in GRPO, with the number of completions as
            denominator. `"seq-mean-token-sum"`: $\sum_i \sum_t x_{i,t}$ over the number of completions. `"token-sum"`: the
            same sum over the number of tokens as in DAPO, or over a constant as in Dr. GRPO.
        denominator (`torch.Tensor` or `float`):
            Completions, tokens or constant of the whole batch.

    Returns:
        `torch.Tensor`: The micro-batch's part of the loss, a scalar; 0 if no token counts.
    """
    sums = torch.where(mask.bool(), values * mask, 0).sum(1)
    if mode == "seq-mean-token-mean":
        sums = sums / mask.sum(1).clamp(min=1)
    return sums.sum() / denominator
