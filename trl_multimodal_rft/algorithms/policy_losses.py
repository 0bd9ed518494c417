# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Policy losses by the ratio of current to old policy: TRL's, CPGD's, GMPO's and dual-clip PPO's."""

import math
from typing import Annotated, Literal

import torch

from .loss_types import (
    LARGEST_LOG_RATIO,
    LossInputs,
    LossOptions,
    LossOutput,
    clip_metrics,
    importance_ratios,
    log_ratios,
    off_policy_mask,
    off_policy_weights,
    per_token,
    policy_loss,
    ppo_loss,
)
from .metrics import token_mean
from .papers import Paper


_DR_GRPO = Paper("Understanding R1-Zero-Like Training", "2503.20783")
_TOKEN_MEAN = {"mode": "seq-mean-token-mean", "denominator": "completions", "needs_advantage": True}
_TOKEN_SUM = {"mode": "seq-mean-token-sum", "denominator": "completions", "needs_advantage": True}


@policy_loss("luspo", paper=Paper("LUSPO", "2602.05261"), **_TOKEN_SUM, sequence_level=True)
@policy_loss("dapo", paper=Paper("DAPO", "2503.14476"), sequence_level=True, needs_advantage=True)
@policy_loss("dr_grpo", paper=_DR_GRPO, denominator="length_limit", sequence_level=True, needs_advantage=True)
@policy_loss("bnpo", paper=None, denominator="micro_batch_tokens", sequence_level=True, needs_advantage=True)
@policy_loss("grpo", paper=Paper("DeepSeekMath", "2402.03300"), **_TOKEN_MEAN, sequence_level=True)
def clipped_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    PPO's clipped loss $-\min(r A, \mathrm{clip}(r, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A)$ with $r$
    of at most $\delta$. The loss types with this formula differ in the average over tokens and completions.

    Args:
        inputs ([`LossInputs`]):
            Tensors of the micro-batch.
        options ([`LossOptions`]):
            Options of the loss.

    Returns:
        [`LossOutput`]: Metrics, and the loss of each token, shape `(B, T)`, or of each completion, shape `(B,)`
        (`(B, 1)` if it counts for every token of the completion).
    """
    return ppo_loss(importance_ratios(inputs, options), inputs, options)


@policy_loss("cispo", sequence_level=True, needs_advantage=True)
def cispo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    REINFORCE with clipped importance weights, $-\mathrm{sg}[\min(r, \epsilon_\mathrm{high})] A \log \pi$ with the
    stop-gradient $\mathrm{sg}$, see [MiniMax-M1](https://huggingface.co/papers/2506.13585).

    See [`clipped_loss`] for the arguments.
    """
    advantages = per_token(inputs.advantages)
    ratio = importance_ratios(inputs, options).detach()
    loss = -ratio.clamp(max=options.epsilon_high) * advantages * inputs.logps
    is_clipped = (ratio > options.epsilon_high) & (advantages > 0)
    metrics = {"cispo_clip_ratio": token_mean(is_clipped.float(), inputs.mask)}
    return LossOutput(loss * inputs.weights * off_policy_weights(inputs, options), metrics)


@policy_loss("sapo", **_TOKEN_MEAN, sequence_level=True, clips_ratios=False)
def sapo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    Policy loss with a soft gate instead of the clip, $-\frac{4}{\tau} \sigma(\tau (r - 1)) A$, see
    [Soft Adaptive Policy Optimization](https://huggingface.co/papers/2511.20347).

    See [`clipped_loss`] for the arguments.
    """
    advantages = per_token(inputs.advantages)
    temperature = torch.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    gate = (temperature * (importance_ratios(inputs, options) - 1)).sigmoid() * 4 / temperature
    return LossOutput(-gate * advantages * inputs.weights * off_policy_weights(inputs, options), {})


@policy_loss("vespo", sequence_level=True, clips_ratios=False, needs_advantage=True)
def vespo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    REINFORCE weighted by completion, $-\mathrm{sg}[e^\lambda w^k e^{-\lambda w}] A \log \pi$, see
    [VESPO](https://huggingface.co/papers/2602.10693). Here $w$ is the ratio of policy to engine over the whole
    completion, and $\mathrm{sg}$ stops the gradient.

    See [`clipped_loss`] for the arguments.
    """
    advantages = per_token(inputs.advantages)
    smallest_log = math.log(1e-8)
    with torch.no_grad():
        log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
        log_w = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).sum(1, keepdim=True)
        if inputs.sampling_ratio is not None:
            log_w = log_w + inputs.sampling_ratio.log().clamp(smallest_log, LARGEST_LOG_RATIO).sum(1, keepdim=True)
        log_w = log_w.clamp(smallest_log, LARGEST_LOG_RATIO)
        k = torch.where(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg)
        rate = torch.where(advantages >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
        weight = (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    loss = -weight * advantages * inputs.logps * inputs.weights * off_policy_mask(inputs, options)
    return LossOutput(loss, {"vespo/phi_seq_mean": inputs.mean_of_scored(weight)})


@policy_loss("cpgd")
def cpgd_loss(
    inputs: LossInputs,
    options: LossOptions,
    *,
    drift_coef: Annotated[float, "[0, inf)"] = 0.01,
    drift_clamp: Annotated[float, "(0, inf]"] = 2.0,
    average: Literal["tokens", "completions"] = "tokens",
) -> LossOutput:
    """
    CPGD's policy gradient, clipped in the *log*-ratio at `log(1 - epsilon_low)` and `log(1 + epsilon_high)`, plus the
    [`policy_drift`], see [CPGD](https://huggingface.co/papers/2505.12504).

    The gradient weight of a token is its advantage, not ratio times advantage, and 0 if the token is clipped. Like a
    KL term, the drift isn't multiplied by the weights of tokens. LightRFT's `use_cpg_loss` has no drift, and averages
    over completions: `"cpgd(drift_coef=0.0, average='completions')"`.

    See [`clipped_loss`] for the other arguments.

    Args:
        drift_coef (`float`, *optional*, defaults to `0.01`):
            Coefficient of the drift.
        drift_clamp (`float`, *optional*, defaults to `2.0`):
            Largest weight of a token in the drift.
        average (`str`, *optional*, defaults to `"tokens"`):
            Whether the loss is the mean over all tokens of an optimizer step, or over its completions the mean of the
            means over their tokens; read by [`~algorithms.losses.as_loss`].
    """
    advantages = per_token(inputs.advantages)
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    smallest_log = math.log(1 - options.epsilon_low)
    largest_log = math.log(1 + options.epsilon_high)
    loss = -torch.min(log_ratio * advantages, log_ratio.clamp(smallest_log, largest_log) * advantages)
    drift = drift_coef * policy_drift(inputs.logps, inputs.old_logps, drift_clamp)
    low = (log_ratio < smallest_log) & (advantages < 0)
    high = (log_ratio > largest_log) & (advantages > 0)
    return LossOutput(
        loss * inputs.weights * off_policy_weights(inputs, options) + drift, clip_metrics(low, high, inputs.mask)
    )


def policy_drift(logps: torch.Tensor, old_logps: torch.Tensor, clamp: float) -> torch.Tensor:
    r"""
    Computes [CPGD](https://huggingface.co/papers/2505.12504)'s drift, a pull back to the policy that sampled.

    The gradient of the drift is $(r - 1) \nabla \log \pi$, as for the k3 estimate of
    $\mathrm{KL}(\pi_\mathrm{old} \| \pi)$, with $r - 1$ clamped so that no token dominates. The value of the drift has
    no meaning.

    Args:
        logps, old_logps (`torch.Tensor`):
            Log-probabilities under the current policy and under the policy that sampled, shape `(B, T)`.
        clamp (`float`):
            Largest weight $r - 1$.

    Returns:
        `torch.Tensor`: Drift of each token, shape `(B, T)`.
    """
    return ((logps.detach() - old_logps).exp() - 1).clamp(max=clamp) * logps


@policy_loss("gmpo", **_TOKEN_MEAN, per_completion=True)
def gmpo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    """
    The advantage of a completion times the geometric mean of its ratios, see
    [Geometric-Mean Policy Optimization](https://huggingface.co/papers/2507.20673). Log-ratios are clipped at
    `-epsilon_low` for negative advantages, and at `epsilon_high` for positive advantages. The paper sets both to 0.4.

    See [`clipped_loss`] for the arguments. Advantages are per completion. The mean is weighted by `weights`.
    """
    advantages = inputs.advantages
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    clipped = torch.where(
        advantages[:, None] > 0, log_ratio.clamp(max=options.epsilon_high), log_ratio.clamp(min=-options.epsilon_low)
    )
    weights = inputs.mask * inputs.weights
    mean = torch.where(weights.bool(), clipped * weights, 0).sum(1) / weights.sum(1).clamp(min=1)
    loss = -mean.clamp(max=LARGEST_LOG_RATIO).exp() * advantages
    low = (log_ratio < -options.epsilon_low) & (advantages[:, None] < 0)
    high = (log_ratio > options.epsilon_high) & (advantages[:, None] > 0)
    loss = (loss[:, None] * off_policy_weights(inputs, options)).squeeze(1)
    return LossOutput(loss, clip_metrics(low, high, inputs.mask))


@policy_loss("dual_clip", needs_advantage=True)
def dual_clip_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    r"""
    PPO's clipped loss, bounded by $-\delta A$ for negative advantages, so that a token that became much likelier can't
    dominate the batch, see [Dual-clip PPO](https://huggingface.co/papers/1912.09729).

    See [`clipped_loss`] for the arguments.
    """
    log_ratio = log_ratios(inputs.logps, inputs.old_logps, inputs.mask)
    return ppo_loss(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp(), inputs, options)
