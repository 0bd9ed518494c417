# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Losses that PPO adds to the policy loss, for the critic and for supervised completions.

Tensors hold `B` completions of up to `T` tokens.
"""

import torch

from .losses import LossOutput
from .metrics import Metric, deviation, explained, nan_mean, share, token_mean


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float | None = None,
) -> LossOutput:
    r"""
    Computes a critic's clipped loss, half of the larger of two squared errors: of its values, and of its values
    clipped around the old values, as in [PPO](https://huggingface.co/papers/1707.06347):
    $\frac{1}{2} \max((\mathrm{clip}(V, V_\mathrm{old} \pm \epsilon) - R)^2, (V - R)^2)$.

    Args:
        values, old_values, returns (`torch.Tensor`):
            Current values, values when the completions were sampled, and returns, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`.
        clip (`float`, *optional*):
            The range $\epsilon$. `None` doesn't clip.

    Returns:
        [`LossOutput`]: Loss of each token, shape `(B, T)`, and metrics.
    """
    squared_error = unclipped_error = (values - returns).square()
    is_clipped = torch.zeros_like(values)
    if clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        squared_error = torch.max(unclipped_error, (clipped_values - returns).square())
        # Within the range, clipped values and values may differ by rounding
        is_clipped = (((values - old_values).abs() > clip) & (squared_error > unclipped_error)).float()
    metrics = {
        "value_loss": token_mean(squared_error / 2, mask),
        "value_clip_ratio": token_mean(is_clipped, mask),
    }
    return LossOutput(squared_error / 2, metrics)


def ptx_loss(logps: torch.Tensor, mask: torch.Tensor) -> LossOutput:
    """
    Computes the supervised loss of PPO-ptx, see [InstructGPT](https://huggingface.co/papers/2203.02155): the mean
    negative log-likelihood of the completions' tokens. Shapes: both `(B, T)`.
    """
    total = -(logps * mask).sum()
    return LossOutput(total / mask.sum(), {"ptx_loss": share(total, mask.sum())})


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""
    Computes the share of the returns' variance that the critic predicts, $1 - \mathrm{Var}(R - V) / \mathrm{Var}(R)$.

    Args:
        values, returns, mask (`torch.Tensor`):
            Values, returns, and 1 on the tokens that count, shape `(B, T)`.

    Returns:
        `torch.Tensor`: A scalar, at most 1; `NaN` if the returns are equal or fewer than two tokens count.
    """
    valid = mask.bool()
    return explained((returns - values)[valid], returns[valid]).value


def critic_metrics(
    values: torch.Tensor, returns: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> dict[str, Metric]:
    """
    Returns mean and standard deviation of each tensor `(B, T)` of all ranks, and the explained variance of the
    returns.
    """
    metrics = {}
    valid = mask.bool()
    for name, tensor in (("values", values), ("returns", returns), ("advantages", advantages)):
        metrics[f"{name}/mean"] = nan_mean(tensor[valid], is_of_all_ranks=True)
        metrics[f"{name}/std"] = deviation(tensor[valid], correction=0)
    return {**metrics, "explained_variance": explained((returns - values)[valid], returns[valid])}
