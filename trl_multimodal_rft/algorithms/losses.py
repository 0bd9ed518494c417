# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The loss of an optimizer step, from a policy loss and further terms, and the losses of RLOO and of views."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .kl import approx_kl
from .loss_types import (
    LOSSES,
    LossInputs,
    LossOptions,
    LossOutput,
    LossType,
    Normalizer,
    aggregate,
    as_loss,
    describe_losses,
    importance_ratios,
    log_ratios,
    off_policy_mask,
    policy_loss,
    ppo_loss,
)
from .metrics import Metric, largest, scored_mean, token_mean, weighted_mean
from .policy_losses import (
    cispo_loss,
    clipped_loss,
    cpgd_loss,
    dual_clip_loss,
    gmpo_loss,
    policy_drift,
    sapo_loss,
    vespo_loss,
)
from .signal import signal_metrics
from .trust_regions import clip_cov_loss, dppo_kl_loss, dppo_tv_loss, fipo_loss, ipo_loss, kl_cov_loss


__all__ = [
    "LOSSES",
    "LossInputs",
    "LossOptions",
    "LossOutput",
    "LossType",
    "Normalizer",
    "aggregate",
    "as_loss",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_loss",
    "cpgd_loss",
    "describe_losses",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "dual_clip_loss",
    "entropy_sums",
    "fipo_loss",
    "gmpo_loss",
    "grpo_loss",
    "importance_ratios",
    "ipo_loss",
    "kl_cov_loss",
    "log_ratios",
    "off_policy_mask",
    "policy_drift",
    "policy_loss",
    "ratio_metrics",
    "rloo_loss",
    "sapo_loss",
    "vespo_loss",
    "view_term",
]


def grpo_loss(
    loss_type: LossType,
    inputs: LossInputs,
    options: LossOptions,
    normalizer: Normalizer,
    *,
    kl_coef: float = 0.0,
    entropy_coef: float | None = None,
    aux_coef: float = 0.0,
) -> LossOutput:
    """
    Computes a micro-batch's part of the loss of an optimizer step, a scalar: the policy loss with a KL term (if
    `inputs` have `ref_logps`), an entropy bonus (unless `entropy_coef` is `None`), and load balancing (if `inputs`
    have an `aux_loss`).
    """
    mask = inputs.mask
    n_micro_batches = normalizer.n_micro_batches
    losses, metrics = loss_type(inputs, options)
    loss = loss_type.average(losses, mask, normalizer)
    metrics = {**metrics, **signal_metrics(losses, inputs, options)}
    if inputs.ref_logps is not None:
        kl = approx_kl(inputs.logps, inputs.ref_logps, mask, options.kl_estimator)
        # A loss with one ratio per completion has no ratios of tokens
        if options.kl_estimator == "k3" and options.kl_bias_correction and not loss_type.per_completion:
            kl = kl * importance_ratios(inputs, options)
        loss = loss + kl_coef * loss_type.average(kl, mask, normalizer)
        metrics["kl"] = token_mean(kl, mask)
    if entropy_coef is not None:
        metrics["policy_loss"] = loss_type.mean(loss, mask, normalizer)
        entropy_sum, weight_sum = entropy_sums(inputs)
        loss = loss - entropy_coef * entropy_sum / weight_sum.clamp(min=1) / n_micro_batches
    if inputs.aux_loss is not None:
        loss = loss + aux_coef * inputs.aux_loss / n_micro_batches
        metrics["aux_loss"] = weighted_mean(inputs.aux_loss, len(mask))
    metrics["entropy"] = scored_mean(inputs.entropies, inputs.scored_tokens)
    return LossOutput(loss, metrics)


def entropy_sums(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted sum of entropies of the tokens that are trained on, and the sum of their weights."""
    weights = inputs.mask * inputs.weights
    return (inputs.entropies * weights).sum(), weights.sum()


def rloo_loss(inputs: LossInputs, options: LossOptions) -> LossOutput:
    """
    RLOO's loss with one clipped ratio per completion, see
    [Back to Basics](https://huggingface.co/papers/2402.14740).

    Args:
        inputs ([`LossInputs`]):
            Tensors of a micro-batch. Its `old_logps` are sums over completions, shape `(B,)`.
        options ([`LossOptions`]):
            The clip range.

    Returns:
        [`LossOutput`]: The mean over completions, and metrics.
    """
    log_ratio = torch.where(inputs.mask.bool(), inputs.logps, 0).sum(1) - inputs.old_logps
    # PPO's loss of `B` completions as of `B` rows with one token
    rows = replace(inputs, mask=torch.ones_like(log_ratio)[:, None], advantages=inputs.advantages[:, None])
    losses, metrics = ppo_loss(log_ratio.exp()[:, None], rows, options)
    return LossOutput(losses.mean(), {**metrics, **signal_metrics(losses, inputs, options)})


def view_term(
    logps: torch.Tensor,
    view_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_coef: float = 0.0,
    kl_clip: float | None = None,
    entropy_coefs: Sequence[float] = (0.0, 0.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the Implicit Perception Loss and the Double Entropy Loss of
    [PAPO](https://huggingface.co/papers/2507.06448) of each token, and the divergence, `(B, T)`, which no gradient
    raises above `kl_clip` nats. Entropies are estimated from sampled tokens, as in the paper.
    """
    kl = approx_kl(logps, view_logps, mask, "k3")
    clean_coef, view_coef = entropy_coefs
    return -kl_coef * kl.clamp(max=kl_clip) - clean_coef * logps - view_coef * view_logps, kl


def ratio_metrics(inputs: LossInputs) -> dict[str, Metric]:
    """Returns mean and largest ratio, and the k3 estimate of the divergence from the policy that sampled."""
    log_ratio = log_ratios(inputs.logps.detach(), inputs.old_logps, inputs.mask)
    ratio = log_ratio.exp()
    return {
        "ratio/mean": token_mean(ratio, inputs.mask),
        "ratio/max": largest(torch.where(inputs.mask.bool(), ratio, 0)),
        "approx_kl": token_mean(ratio - 1 - log_ratio, inputs.mask),
    }
