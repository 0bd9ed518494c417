# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An account of the learning signal: the share of tokens to which rewards give a gradient, and what took the rest."""

import torch

from .loss_types import LossInputs, LossOptions, off_policy_mask, per_token
from .metrics import Metric, share


# What takes the signal from tokens, in the order in which it acts
CAUSES = (
    "no_reward",  # no reward function applies to the completion
    "equal_rewards",  # all completions of the group have the same reward
    "clipped_rewards",  # they have it after the clip of rewards
    "estimator",  # the advantage is 0
    "truncation",  # the completion was cut off, and `mask_truncated_completions` leaves it out
    "entropy_filter",  # other tokens have higher entropies
    "off_policy_mask",
    "engine_ratios",  # the ratio to the engine that sampled is masked
    "trust_region",  # the loss clips the ratio, or has no gradient at it for another reason
)


def causes_by_reward(
    rewards: torch.Tensor, has_signal: torch.Tensor, differs: torch.Tensor, differs_clipped: torch.Tensor
) -> torch.Tensor:
    """
    Returns the index in [`CAUSES`] of what took the signal from each completion before its loss, -1 if nothing did,
    `(N,)`. The flags, `(N,)`, are of a completion's group, whose rewards may differ before and after the clip.
    """
    causes = torch.full_like(rewards, -1, dtype=torch.long)
    causes[~has_signal] = CAUSES.index("estimator")
    causes[~has_signal & ~differs_clipped] = CAUSES.index("clipped_rewards")
    causes[~has_signal & ~differs] = CAUSES.index("equal_rewards")
    causes[rewards.isnan()] = CAUSES.index("no_reward")
    return causes


def signal_metrics(loss: torch.Tensor, inputs: LossInputs, options: LossOptions) -> dict[str, Metric]:
    """
    Returns the shares of the sampled tokens of a micro-batch that have a signal, or lost it to one of [`CAUSES`],
    which sum to 1, and the share of completions with a signal. `loss` is in the graph of `inputs.logps`. Without
    gradients, there are none.
    """
    if not torch.is_grad_enabled():
        return {}
    mask = inputs.mask.bool()
    is_zero = (per_token(inputs.advantages) == 0).expand_as(mask)
    n_sampled = mask.sum(1) if inputs.n_sampled is None else inputs.n_sampled
    # Masked tokens are counted, not marked, as the mask doesn't tell them from padding and results of tools
    n_masked = n_sampled - mask.sum(1)
    completions = torch.full_like(n_masked, -1) if inputs.causes is None else inputs.causes  # their causes, `(B,)`
    completions = torch.where((completions < 0) & is_zero.all(1), CAUSES.index("estimator"), completions)
    has_signal = mask & (_gradient(loss, inputs) != 0) & (completions < 0)[:, None]
    tokens = {
        "estimator": is_zero & (completions < 0)[:, None],
        "entropy_filter": _is_zero(inputs.weights, mask),
        "off_policy_mask": _is_zero(off_policy_mask(inputs, options), mask),
        "engine_ratios": _is_zero(1.0 if inputs.sampling_ratio is None else inputs.sampling_ratio, mask),
        "trust_region": torch.ones_like(mask),
    }
    counts = {"tokens": has_signal.sum()}
    lost = mask & ~has_signal
    for index, cause in enumerate(CAUSES):
        is_cause = (completions == index)[:, None].expand_as(mask)
        if cause in tokens:
            is_cause = is_cause | tokens[cause]
        counts[cause] = (lost & is_cause).sum() + torch.where(completions == index, n_masked, 0).sum()
        lost = lost & ~is_cause
    counts["truncation"] = counts["truncation"] + torch.where(completions < 0, n_masked, 0).sum()
    metrics = {f"signal/{name}": share(count, n_sampled.sum()) for name, count in counts.items()}
    n_completions = torch.ones_like(completions).sum()
    return {"signal/completions": share(has_signal.any(1).sum(), n_completions), **metrics}


def _gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Returns the gradient of a policy loss in the log-probabilities, `(B, T)`. The graph stays for the update."""
    mask = inputs.mask.bool()
    values = torch.where(mask, loss, 0) if loss.shape == mask.shape else loss
    if not (values.requires_grad and inputs.logps.requires_grad):  # no completion was forwarded
        return torch.zeros_like(inputs.logps)
    # A loss of one's own may not read them
    (gradient,) = torch.autograd.grad(values.sum(), inputs.logps, retain_graph=True, allow_unused=True)
    return torch.zeros_like(inputs.logps) if gradient is None else gradient


def _is_zero(values: torch.Tensor | float, mask: torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return (values == 0).expand_as(mask)
    return torch.full_like(mask, values == 0)
