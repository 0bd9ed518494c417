# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Policy losses that choose or weigh single tokens: by the divergence from the policy that sampled (IPO, DPPO), by the
covariance of log-probability and advantage (Clip-Cov, KL-Cov), or by what follows the token (FIPO).
"""

from typing import Annotated

import torch

from .loss_types import (
    LARGEST_LOG_RATIO,
    LossInputs,
    LossOptions,
    LossOutput,
    clip_metrics,
    importance_ratios,
    log_ratios,
    off_policy_weights,
    per_token,
    policy_loss,
    ppo_loss,
)
from .returns import cumulative_returns


def _sampler_logps(inputs: LossInputs) -> torch.Tensor:
    """Returns log-probabilities by which tokens were drawn: the engine's, and the old policy's where it has none."""
    if inputs.sampling_logps is None:
        return inputs.old_logps
    return torch.where(inputs.sampling_logps.isnan(), inputs.old_logps, inputs.sampling_logps)


@policy_loss("ipo", paper=None)
def ipo_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    ipo_threshold: Annotated[float, "(0, inf]"] = 0.1,
    kl_tau: Annotated[float, "[0, inf)"] = 1e-3,
) -> LossOutput:
    r"""
    The loss `ipo` of prime-rl, $-r A\, [|\pi - \mu| \le c] + \tau \log^2(\pi / \mu)$: tokens whose probability moved
    further than $c$ from that of the sampler $\mu$, in either direction, have no policy gradient.

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments. Like a KL term, the second term isn't
    multiplied by the weights of tokens.

    Args:
        ipo_threshold (`float`, *optional*, defaults to `0.1`):
            $c$.
        kl_tau (`float`, *optional*, defaults to `1e-3`):
            $\tau$.
    """
    sampler = _sampler_logps(inputs)
    log_ratio = log_ratios(inputs.logps, sampler, inputs.mask)
    change = inputs.logps.detach().exp() - sampler.exp()
    low = change < -ipo_threshold
    high = change > ipo_threshold
    loss = -importance_ratios(inputs, options) * per_token(inputs.advantages) * ~(low | high)
    return LossOutput(
        loss * inputs.weights * off_policy_weights(inputs, options) + kl_tau * log_ratio.square(),
        clip_metrics(low, high, inputs.mask),
    )


def _dppo_loss(
    inputs: LossInputs, options: LossOptions, low: torch.Tensor, high: torch.Tensor, clip_ratio_c: float
) -> LossOutput:
    """
    Computes DPPO's loss from booleans `low` and `high`, `(B, T)`: whether a token has left the trust region downwards
    or upwards, and so has no gradient if its advantage is negative or positive.
    """
    advantages = per_token(inputs.advantages)
    log_ratio = log_ratios(inputs.logps.detach(), inputs.old_logps, inputs.mask)
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip_ratio_c)
    low = low & (advantages < 0)
    high = high & (advantages > 0)
    loss = -ratio * advantages * inputs.logps * ~(low | high)
    return LossOutput(
        loss * inputs.weights * off_policy_weights(inputs, options), clip_metrics(low, high, inputs.mask)
    )


@policy_loss("dppo_tv", needs_advantage=True)
def dppo_tv_loss(
    inputs: LossInputs, options: LossOptions, *, clip_ratio_c: Annotated[float, "(0, inf]"] = 20.0
) -> LossOutput:
    r"""
    DPPO's loss with total variation, $-\mathrm{sg}[\min(r, c)] A \log \pi$ within the trust region: tokens with
    $A > 0$ and $\pi - \mu > \epsilon_\mathrm{high}$, or $A < 0$ and $\mu - \pi > \epsilon_\mathrm{low}$, have no
    gradient, see
    [Rethinking the Trust Region](https://huggingface.co/papers/2602.04879). $\mu$ is the probability by which the
    token was sampled. The authors' script sets both $\epsilon$ to 0.15.

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments.

    Args:
        clip_ratio_c (`float`, *optional*, defaults to `20.0`):
            $c$, the largest ratio.
    """
    sampler = _sampler_logps(inputs)
    change = inputs.logps.detach().exp() - sampler.exp()
    return _dppo_loss(inputs, options, change < -options.epsilon_low, change > options.epsilon_high, clip_ratio_c)


@policy_loss("dppo_kl", needs_advantage=True)
def dppo_kl_loss(
    inputs: LossInputs, options: LossOptions, *, clip_ratio_c: Annotated[float, "(0, inf]"] = 20.0
) -> LossOutput:
    r"""
    DPPO's loss with the KL divergence of *this token or another*,
    $\mu \log \frac{\mu}{\pi} + (1 - \mu) \log \frac{1 - \mu}{1 - \pi}$, in place of the total variation of
    [`dppo_tv_loss`], see [Rethinking the Trust Region](https://huggingface.co/papers/2602.04879). The authors' script
    sets both $\epsilon$ to 0.05.

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments.

    Args:
        clip_ratio_c (`float`, *optional*, defaults to `20.0`):
            $c$, the largest ratio.
    """
    sampler = _sampler_logps(inputs)
    logps = inputs.logps.detach()
    rest_logps = [(1 - chosen.exp()).clamp(min=0) + 1e-8 for chosen in (sampler, logps)]
    # A probability of 0 adds nothing, also where its logarithm is -inf
    this_token = torch.where(sampler.exp() > 0, sampler.exp() * (sampler - logps), 0)
    divergence = this_token + (1 - sampler.exp()) * (rest_logps[0] / rest_logps[1]).log()
    low = (divergence > options.epsilon_low) & (logps < sampler)
    high = (divergence > options.epsilon_high) & (logps > sampler)
    return _dppo_loss(inputs, options, low, high, clip_ratio_c)


def covariances(inputs: LossInputs) -> torch.Tensor:
    """
    Returns each token's part of the covariance of log-probability and advantage over the micro-batch, `(B, T)`, minus
    infinity outside the mask.
    """
    mask = inputs.mask.bool()
    n_tokens = mask.sum().clamp(min=1)
    logps = inputs.logps.detach()
    advantages = per_token(inputs.advantages).expand_as(logps)
    centred = [values - torch.where(mask, values, 0).sum() / n_tokens for values in (advantages, logps)]
    return torch.where(mask, centred[0] * centred[1], -torch.inf)


@policy_loss("clip_cov")
def clip_cov_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    clip_cov_ratio: Annotated[float, "(0, 1]"] = 2e-4,
    clip_cov_lb: Annotated[float, "[0, inf)"] = 1.0,
    clip_cov_ub: Annotated[float, "(0, inf]"] = 5.0,
) -> LossOutput:
    r"""
    PPO's clipped loss, from which Clip-Cov leaves out a few random tokens whose log-probability and advantage vary
    together, as such tokens lower the entropy, see
    [The Entropy Mechanism](https://huggingface.co/papers/2505.22617). A token's covariance is
    $(\log \pi - \overline{\log \pi}) (A - \bar A)$ with the means over the micro-batch, as in the authors' code.

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments.

    Args:
        clip_cov_ratio (`float`, *optional*, defaults to `2e-4`):
            Share of the tokens to leave out, at least one token of those in the range.
        clip_cov_lb, clip_cov_ub (`float`, *optional*, defaults to `1.0` and `5.0`):
            Range of the covariance of tokens that may be left out. Tokens that PPO clips never are.
    """
    loss, metrics = ppo_loss(importance_ratios(inputs, options), inputs, options)
    if not inputs.logps.requires_grad:  # an evaluation draws no random numbers
        return LossOutput(loss, metrics)
    advantages = per_token(inputs.advantages)
    ratio = importance_ratios(inputs, options).detach()
    low = (ratio < 1 - options.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + options.epsilon_high) & (advantages > 0)
    covariance = covariances(inputs)
    candidates = ((covariance > clip_cov_lb) & (covariance < clip_cov_ub) & ~low & ~high).flatten().nonzero().flatten()
    n_left_out = max(int(clip_cov_ratio * int(inputs.mask.sum())), 1)
    chosen = candidates[torch.randperm(len(candidates), device=candidates.device)[:n_left_out]]
    is_kept = torch.ones_like(loss).flatten().index_fill(0, chosen, 0).view_as(loss)
    return LossOutput(loss * is_kept, metrics)


@policy_loss("kl_cov", clips_ratios=False)
def kl_cov_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    kl_cov_ratio: Annotated[float, "(0, 1]"] = 2e-4,
    ppo_kl_coef: Annotated[float, "[0, inf)"] = 1.0,
) -> LossOutput:
    r"""
    The policy gradient $-r A$ without a clip, with a penalty $\beta\, |\log r|$ on the tokens of largest covariance
    between log-probability and advantage, see [The Entropy Mechanism](https://huggingface.co/papers/2505.22617) and
    [`clip_cov_loss`].

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments. Like a KL term, the penalty isn't
    multiplied by the weights of tokens.

    Args:
        kl_cov_ratio (`float`, *optional*, defaults to `2e-4`):
            Share of the tokens with the penalty, at least one token of the micro-batch.
        ppo_kl_coef (`float`, *optional*, defaults to `1.0`):
            $\beta$.
    """
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    covariance = covariances(inputs)
    n_chosen = max(int(kl_cov_ratio * int(inputs.mask.sum())), 1)
    chosen = covariance.flatten().topk(n_chosen).indices
    penalized = torch.zeros_like(log_ratio).flatten().index_fill(0, chosen, 1).view_as(log_ratio)
    loss = -log_ratio.exp() * per_token(inputs.advantages)
    penalty = ppo_kl_coef * penalized * log_ratio.abs()
    return LossOutput(loss * inputs.weights * off_policy_weights(inputs, options) + penalty, {})


@policy_loss("fipo", needs_advantage=True)
def fipo_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    decay_rate: Annotated[float, "(0, inf]"] = 32.0,
    clip_range: Annotated[float, "(0, 1]"] = 0.2,
    clip_high_only: bool = True,
    safety_threshold: Annotated[float, "(0, inf]"] = 4.0,
) -> LossOutput:
    r"""
    PPO's clipped loss, weighted by what follows a token:
    $\mathrm{clip}(\exp \sum_{s \ge t} \gamma^{s - t} \log r_s, 1 - \epsilon_f, 1 + \epsilon_f)$, without gradient and
    with $\gamma = 2^{-1 / \mathrm{decay\_rate}}$, see [FIPO](https://huggingface.co/papers/2603.19835). Until the
    first update on a batch, all weights are 1. Tokens with a ratio above `delta` aren't summed.

    See [`~algorithms.policy_losses.clipped_loss`] for the other arguments.

    Args:
        decay_rate (`float`, *optional*, defaults to `32.0`):
            Tokens after which a token counts half.
        clip_range (`float`, *optional*, defaults to `0.2`):
            $\epsilon_f$.
        clip_high_only (`bool`, *optional*, defaults to `True`):
            Whether the smallest weight is 1 instead of $1 - \epsilon_f$.
        safety_threshold (`float`, *optional*, defaults to `4.0`):
            Ratio above which the weight of a token with a negative advantage is at most 1, and at least 0.8.
    """
    ratio = importance_ratios(inputs, options)
    log_ratio = log_ratios(inputs.logps.detach(), inputs.old_logps, inputs.mask)
    summed = torch.where(ratio.detach() > options.delta, 0, log_ratio)
    future = cumulative_returns(summed, inputs.mask, 2 ** (-1 / decay_rate))
    smallest = 1.0 if clip_high_only else 1 - clip_range
    weights = future.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(smallest, 1 + clip_range)
    is_unsafe = (per_token(inputs.advantages) < 0) & (ratio.detach() > safety_threshold)
    weights = torch.where(is_unsafe, weights.clamp(0.8, 1.0), weights)
    loss, metrics = ppo_loss(ratio, inputs, options)
    metrics["fipo/influence_weight_mean"] = inputs.mean_of_scored(weights)
    return LossOutput(loss * weights, metrics)
