# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages by the rewards of a group or of a batch: GRPO, RLOO, REINFORCE++, CPGD, Dr. GRPO and Online DPO."""

from typing import Literal

import torch

from .estimators import EPS, estimator, group_statistics
from .returns import cumulative_returns, token_rewards, whiten


@estimator("group_norm", alias="grpo", needs="group")
def group_norm(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = EPS,
) -> torch.Tensor:
    r"""
    GRPO's advantage, $(R - \mathrm{mean}) / (\sigma + \epsilon)$ with the unbiased standard deviation of the group,
    see [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

    Args:
        eps (`float`, *optional*, defaults to `1e-4`):
            $\epsilon$, by default TRL's.
    """
    groups = group_statistics(rewards, group_ids)
    advantages = groups.centred
    if scale == "group":
        advantages = advantages / (groups.std(correction=1) + eps)[groups.index]
    elif scale == "batch":
        scorable = rewards[~rewards.isnan()].cpu().double()
        std = scorable.std() if len(scorable) > 1 else scorable.new_zeros(())
        advantages = advantages / (std + eps)
    return advantages.to(rewards)


@estimator("rloo", needs="group", kl_in_reward=True)
def rloo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    RLOO's advantage, the reward minus the mean reward of the *other* completions of the group, see
    [Back to Basics](https://huggingface.co/papers/2402.14740). The reward contains the KL penalty of the whole
    completion.

    See [`~algorithms.advantages.estimate_advantages`] for the arguments.
    """
    groups = group_statistics(rewards, group_ids)
    # The reward minus the group mean, times this factor, is the reward minus the mean of the others
    factor = groups.count / (groups.count - 1).clamp(min=1)
    return (groups.centred * factor[groups.index]).to(rewards)


@estimator("reinforce", alias="reinforce++", per_token=True, kl_in_reward=True)
def reinforce(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    r"""
    REINFORCE++'s advantage: the return of each token ($\gamma = 1$), whitened over all tokens of the batch, see
    [REINFORCE++](https://huggingface.co/papers/2501.03262). Every token is rewarded with its KL penalty, and the last
    token also with the completion's reward. One completion per prompt is enough.

    See [`~algorithms.advantages.estimate_advantages`] for the arguments.
    """
    mask = mask.bool() & ~rewards.isnan()[:, None]
    returns = cumulative_returns(token_rewards(rewards, mask, old_logps, ref_logps, kl_coef=kl_coef), mask)
    return whiten(returns, mask)


@estimator("reinforce_baseline", alias="reinforce++_baseline", needs="group", default_kl_estimator="k2")
def reinforce_baseline(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    norm_level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    r"""
    REINFORCE++-baseline's advantage: the reward minus the mean of its group, whitened over the batch, see
    [REINFORCE++](https://huggingface.co/papers/2501.03262). Groups without signal are left out of the whitening, and
    have the advantage 0.

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

    Args:
        norm_level (`str`, *optional*, defaults to `"token"`):
            Unit that counts once in the mean and the standard deviation: `"token"`, so that long completions count
            more, or `"sequence"`.
    """
    groups = group_statistics(rewards, group_ids)
    weights = mask.sum(1).cpu().double() if norm_level == "token" else torch.ones_like(groups.centred)
    scorable = ~rewards.isnan().cpu()
    return whiten(groups.centred, groups.has_signal[groups.index] & scorable, torch.where(scorable, weights, 0)).to(
        rewards
    )


@estimator("cpgd", needs="group")
def cpgd(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    weight: Literal["none", "std", "clip_filter_like"] = "clip_filter_like",
) -> torch.Tensor:
    r"""
    CPGD's advantage, $\omega \cdot (R - \mathrm{mean})$ with a weight $\omega$ per group, see
    [CPGD](https://huggingface.co/papers/2505.12504).

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments.

    Args:
        weight (`str`, *optional*, defaults to `"clip_filter_like"`):
            Weight of a group with signal: 1 (`"none"`), 1 over its population standard deviation (`"std"`), or the
            number of groups divided by the number of groups with signal, at most 3 (`"clip_filter_like"`).
    """
    groups = group_statistics(rewards, group_ids)
    if weight == "std":
        weights = 1 / (groups.std(correction=0) + 1e-6)
    elif weight == "clip_filter_like":
        weights = clip_filter_like_weights(groups.has_signal)
    else:
        weights = torch.ones_like(groups.squares)
    return (groups.centred * weights[groups.index]).to(rewards)


def clip_filter_like_weights(
    has_signal: torch.Tensor, clip: float = 3.0, weight_without_signal: float = 1.0
) -> torch.Tensor:
    """
    Returns weights of groups, `(G,)`, float64, by which groups with signal make up for groups without: if 2 of 4
    groups have signal, theirs is 4 / 2, at most `clip`, and the others' `weight_without_signal`. If no group has
    signal, all weights are 1.
    """
    n_with_signal = has_signal.sum().double()
    if n_with_signal == 0:
        return torch.ones_like(has_signal, dtype=torch.float64)
    return torch.where(has_signal, (len(has_signal) / n_with_signal).clamp(max=clip), weight_without_signal)


@estimator("dr_grpo", needs="group")
def dr_grpo(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    r"""
    Dr. GRPO's advantage, $R - \mathrm{mean}$, which doesn't favour groups with little spread, see
    [Understanding R1-Zero-Like Training](https://huggingface.co/papers/2503.20783).

    See [`~algorithms.advantages.estimate_advantages`] for the arguments.
    """
    return group_norm(rewards, group_ids, scale="none")


@estimator("online_dpo", needs="group", kl_in_reward=True)
def online_dpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    loss: Literal["sigmoid", "ipo"] = "sigmoid",
) -> torch.Tensor:
    r"""
    Online DPO's weight $G \beta \sigma(-\beta \Delta)$ for the completion with the largest reward of a group, and the
    negative weight for the completion with the smallest reward, see
    [Online AI Feedback](https://huggingface.co/papers/2402.04792). The group has $G$ completions, and $\Delta$ is the
    difference of $\log \pi - \log \pi_\mathrm{ref}$ between the two. Other completions, and groups whose
    rewards are equal up to rounding, have the weight 0. With `loss="ipo"`
    ([IPO](https://huggingface.co/papers/2310.12036)), the weight is $G (1 / \beta - 2 \Delta)$.

    With a policy loss that sums over the tokens of a completion (`"luspo"`), the first update on a batch has the
    gradient of DPO's loss.

    See [`~algorithms.advantages.estimate_advantages`] for the other arguments; `kl_coef` is $\beta$, above 0.

    Args:
        loss (`str`, *optional*, defaults to `"sigmoid"`):
            Loss of a pair: `"sigmoid"` or `"ipo"`.

    Raises:
        `ValueError`: Without log-probabilities of policy and reference, or if `kl_coef` isn't above 0.
    """
    if old_logps is None or ref_logps is None or kl_coef <= 0:
        raise ValueError(
            "'online_dpo' compares the policy with its reference; pass `old_logps`, `ref_logps` and a `kl_coef` above "
            "0."
        )
    _, groups = group_ids.unique(return_inverse=True)
    # Batch indices, sorted by group, and by reward within a group. Rewards `[0.5, NaN, 0.9, 0.1]` of the groups
    # `[0, 0, 1, 1]` give `[0, 3, 2]`.
    scorable_indices = (~rewards.isnan()).nonzero().flatten()
    reward_order = scorable_indices[rewards[scorable_indices].argsort(stable=True)]
    sorted_indices = reward_order[groups[reward_order].argsort(stable=True)]
    n_scorable = groups[sorted_indices].bincount()
    has_scorable = n_scorable > 0
    ends = n_scorable.cumsum(0)
    # Batch indices of the first and the last completion of each group in this order: `[0, 3]` and `[0, 2]`
    worst = sorted_indices[(ends - n_scorable)[has_scorable]]
    best = sorted_indices[ends[has_scorable] - 1]
    has_signal = group_statistics(rewards, group_ids).has_signal.to(groups.device)
    is_pair = has_signal[groups[best]]
    worst = worst[is_pair]
    best = best[is_pair]
    log_ratios = torch.where(mask.bool(), old_logps - ref_logps, 0).double().sum(1)  # of whole completions
    margins = log_ratios[best] - log_ratios[worst]
    weights = kl_coef * (-kl_coef * margins).sigmoid() if loss == "sigmoid" else 1 / kl_coef - 2 * margins
    advantages = torch.zeros_like(rewards)
    advantages[best] = (groups.bincount()[groups[best]] * weights).to(rewards)
    advantages[worst] = -advantages[best]
    return advantages
