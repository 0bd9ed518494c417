# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages with weights: of groups (MaxRL), of completions in a baseline (OPO, OTB), or by the best of k."""

import math
from typing import Annotated, Literal

import torch

from .estimators import estimator, group_statistics
from .returns import cumulative_returns, token_rewards


@estimator("max_rl", needs="group")
def max_rl(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    MaxRL's advantage, $(R - \mathrm{mean}) / \mathrm{mean}$, by which a prompt that is solved in a share $p$ of its
    completions weighs $1 / p$, as in a maximum of the likelihood, see
    [Maximum Likelihood Reinforcement Learning](https://huggingface.co/papers/2602.02710). The paper's rewards are 0
    and 1. With rewards below 0, the divisor is the mean of $|R|$.

    See [`~algorithms.advantages.estimate_advantages`] for the arguments.
    """
    groups = group_statistics(rewards, group_ids)
    sizes = rewards.cpu().double().nan_to_num().abs()
    means = torch.zeros_like(groups.squares).index_add(0, groups.index, sizes) / groups.count.clamp(min=1)
    # Only a group without signal has a mean of 0, and its centred rewards are 0
    return (groups.centred / torch.where(groups.has_signal, means, 1)[groups.index]).to(rewards)


def _best_of_k(rewards: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns, for each of `n` rewards, the mean over all its sets of `k` of the largest reward with it, and without it,
    `(n,)`. Rewards 0, 1 and 3 with `k=2` give `[2, 2, 3]` and `[2, 1.5, 0.5]`. A `k` above `n` counts as `n`.
    """
    n = len(rewards)
    k = min(k, n)
    # For each completion, the sorted rewards of the others; the j-th is the largest of `C(j, k - 2)` sets of `k - 1`
    order = rewards.argsort()
    others = order.expand(n, n)[order != torch.arange(n)[:, None]].view(n, n - 1)
    n_sets = math.comb(n - 1, k - 1)
    shares = torch.tensor([math.comb(j, k - 2) / n_sets for j in range(n - 1)], dtype=rewards.dtype)
    others_rewards = rewards[others]
    best_with = (others_rewards.maximum(rewards[:, None]) * shares).sum(1)
    best_without = (others_rewards * shares).sum(1)
    return best_with, best_without


@estimator("pass_at_k", needs="group")
def pass_at_k(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    k: Annotated[int, "[2, inf)"] = 4,
    norm: Literal["std", "none"] = "std",
) -> torch.Tensor:
    r"""
    Advantage of Pass@k Training, $(\mathbb{E}[\max_{S \ni i} R] - \mathrm{mean}) / \sigma$, see
    [Pass@k Training](https://huggingface.co/papers/2508.10751): the mean of the largest reward in all sets $S$ of $k$
    completions of the group that contain completion $i$, minus mean and over population standard deviation of the
    largest reward in all sets of $k$. With rewards of 0 and 1, it is the paper's analytical solution.

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

    Args:
        k (`int`, *optional*, defaults to `4`):
            $k$, at most `num_generations`.
        norm (`str`, *optional*, defaults to `"std"`):
            Whether to divide by $\sigma + 10^{-6}$ (`"std"`) or by nothing (`"none"`).
    """
    groups = group_statistics(rewards, group_ids)
    values = rewards.cpu().double()
    advantages = torch.zeros_like(values)
    for group in groups.has_signal.nonzero().flatten().tolist():
        members = ((groups.index == group) & ~values.isnan()).nonzero().flatten()
        best_with, _ = _best_of_k(values[members], k)
        mean = best_with.mean()  # as all completions are in equally many sets
        scale = 1.0
        if norm == "std":
            n = len(members)
            size = min(k, n)
            # The j-th of the sorted rewards is the largest of `C(j, k - 1)` sets
            shares = [math.comb(j, size - 1) / math.comb(n, size) for j in range(n)]
            deviations = (values[members].sort().values - mean).square()
            scale = (deviations * torch.tensor(shares, dtype=values.dtype)).sum().sqrt().item() + 1e-6
        advantages[members] = (best_with - mean) / scale
    return advantages.to(rewards)


@estimator("pkpo", needs="group")
def pkpo(rewards: torch.Tensor, group_ids: torch.Tensor, *, k: Annotated[int, "[2, inf)"] = 4) -> torch.Tensor:
    r"""
    PKPO's advantage, $k\, \mathbb{E}[\max_{S \ni i} R - \max_{S \setminus i} R]$ over all sets $S$ of $k$ completions
    of the group that contain completion $i$: what the completion adds to the best of the others. The mean over
    completions is an unbiased estimate of the gradient of the best of $k$, see
    [Pass@K Policy Optimization](https://huggingface.co/papers/2505.15201), Equation 33.

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

    Args:
        k (`int`, *optional*, defaults to `4`):
            $k$, at most `num_generations`. With `num_generations`, only the best completion has an advantage.
    """
    groups = group_statistics(rewards, group_ids)
    values = rewards.cpu().double()
    advantages = torch.zeros_like(values)
    for group in groups.has_signal.nonzero().flatten().tolist():
        members = ((groups.index == group) & ~values.isnan()).nonzero().flatten()
        best_with, best_without = _best_of_k(values[members], k)
        advantages[members] = min(k, len(members)) * (best_with - best_without)
    return advantages.to(rewards)


@estimator("opo", needs="group")
def opo(rewards: torch.Tensor, group_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""
    OPO's advantage, $R - \sum_j l_j R_j / \sum_j l_j$ with the lengths $l_j$ of the group's completions, the baseline
    of least variance if every token's gradient has the same norm, see
    [On-Policy RL with Optimal Reward Baseline](https://huggingface.co/papers/2505.23585). A length counts the tokens
    that are trained on.

    See [`~algorithms.advantages.estimate_advantages`] for the arguments.
    """
    lengths = mask.sum(1).cpu().double()
    return group_statistics(rewards, group_ids, lengths).centred.to(rewards)


@estimator("optimal_token_baseline", needs="group", per_token=True, reads_logps=True)
def optimal_token_baseline(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    r"""
    OTB's advantage of token $t$, $G_t - \sum_j W_{j,t} G_{j,t} / \sum_j W_{j,t}$ over the group's completions of at
    least $t$ tokens, see [The Optimal Token Baseline](https://huggingface.co/papers/2602.07078). $G_t$ is the return,
    and $W_t = \sum_{s \le t} w_s$ the energy of the completion so far. The paper's $w_s = 1 - 2 \pi_s + \sum_v
    \pi_v^2$ is the squared norm of the gradient of a token's logits; here $w_s = 1 - \pi_s$, which has the same mean
    and needs only the probability $\pi_s$ of the sampled token. A token that no other completion reaches has the
    advantage 0.

    See [`~algorithms.advantages.estimate_advantages`] for the arguments. Tokens outside the mask are skipped.
    """
    groups = group_statistics(rewards, group_ids)
    mask = (mask.bool() & ~rewards.isnan()[:, None]).cpu()
    logps = old_logps.cpu().double()
    references = None if ref_logps is None else ref_logps.cpu().double()
    # The baseline moves with the rewards. Centred ones keep equal rewards exactly at 0
    returns = cumulative_returns(token_rewards(groups.centred, mask, logps, references, kl_coef=kl_coef), mask)
    energies = torch.where(mask, -torch.expm1(logps), 0).clamp(min=0).cumsum(1)
    # Tokens with the same number in their completion are compared, wherever they stand: the mask `[0, 1, 0, 1]` has
    # the numbers 0 and 1
    numbers = torch.where(mask, mask.cumsum(1) - 1, 0)
    cells = (groups.index[:, None] * mask.size(1) + numbers)[mask]
    totals = returns.new_zeros(len(groups.count) * mask.size(1))
    weighted = totals.index_add(0, cells, (energies * returns)[mask])
    weights = totals.index_add(0, cells, energies[mask])
    baselines = torch.where(weights > 0, weighted / weights.clamp(min=1e-300), 0)
    advantages = torch.zeros_like(returns)
    advantages[mask] = returns[mask] - baselines[cells]
    return advantages.to(rewards)
