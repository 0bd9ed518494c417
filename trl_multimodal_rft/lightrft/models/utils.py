# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""KL divergence, token rewards and masked means with the signatures of `lightrft.models.utils`."""

from collections.abc import Sequence
from typing import Literal

import torch

from ...algorithms.kl import approx_kl
from ...algorithms.returns import terminal_rewards


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    action_mask: torch.Tensor | None = None,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
    use_kl_estimator_k3: bool = False,
) -> torch.Tensor:
    """
    Estimates the KL divergence from the reference at each token, see [`~algorithms.kl.approx_kl`].

    Args:
        log_probs, log_probs_base (`torch.Tensor`):
            Log-probabilities under the policy and under the reference, shape `(B, A)`.
        action_mask (`torch.Tensor`, *optional*):
            1 on actions, shape `(B, A)`; all ones by default.
        kl_estimator, use_kl_estimator_k3 (*optional*, default to `"k1"` and `False`):
            Estimator (`"k1"`, `"k2"` or `"k3"`), and whether `"k3"` replaces `kl_estimator`.

    Returns:
        `torch.Tensor`: The estimate, float32, shape `(B, A)`, 0 outside the mask.
    """
    mask = torch.ones_like(log_probs) if action_mask is None else action_mask
    estimator = "k3" if use_kl_estimator_k3 else kl_estimator
    return approx_kl(log_probs.float(), log_probs_base.float(), mask, estimator)


def compute_reward(
    r: torch.Tensor | float,
    kl_coef: float,
    kl: torch.Tensor | list[torch.Tensor],
    action_mask: torch.Tensor | None = None,
    num_actions: int | Sequence[int] | None = None,
    reward_clip_range: tuple[float, float] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """
    Returns token rewards: the negative KL penalty on every action, plus the completion's reward on the last action.
    Three actions with a reward of 1 and KL penalties of 0.1 get `[-0.1, -0.1, 0.9]`.

    Args:
        r (`torch.Tensor` or `float`):
            Rewards of the completions, shape `(B,)`, or one reward for all.
        kl_coef, kl (`float`, and `torch.Tensor` or `list[torch.Tensor]`):
            Coefficient of the penalty, and KL divergence of each token: shape `(B, A)`, or a list of tensors of shape
            `(A,)`, one per completion. A negative coefficient counts as 0.
        action_mask (`torch.Tensor`, *optional*):
            1 on actions, shape `(B, A)`.
        num_actions (`int` or `list[int]`, *optional*):
            Without a mask, the number of tokens at the start of each completion that are actions; all by default.
        reward_clip_range (`tuple[float, float]`, *optional*):
            Range to clip `r` to.

    Returns:
        `torch.Tensor` or `list[torch.Tensor]`: Token rewards, 0 outside the mask, shape `(B, A)`; without a mask, a
        list with one tensor per completion.
    """
    r = torch.as_tensor(r, dtype=kl[0].dtype, device=kl[0].device).expand(len(kl))
    if reward_clip_range is not None:
        r = r.clamp(*reward_clip_range)
    if action_mask is None:
        # One call per completion, with a mask of its first `n` tokens
        n_actions = [len(row) for row in kl] if num_actions is None else num_actions
        n_actions = [n_actions] * len(kl) if isinstance(n_actions, int) else n_actions
        return [
            compute_reward(reward, kl_coef, row[None], torch.arange(len(row), device=row.device)[None] < n)[0]
            for reward, row, n in zip(r, kl, n_actions, strict=True)
        ]
    divergence = kl if isinstance(kl, torch.Tensor) else torch.stack(kl)
    return terminal_rewards(r, action_mask) - max(kl_coef, 0.0) * torch.where(action_mask.bool(), divergence, 0)


def masked_mean(tensor: torch.Tensor, mask: torch.Tensor | None, dim: int | None = None) -> torch.Tensor:
    """
    Returns the mean of the values where a mask is 1.

    Args:
        tensor, mask (`torch.Tensor`):
            Values, and their mask of the same shape; without a mask, all values count.
        dim (`int`, *optional*):
            Dimension to reduce; all by default.

    Returns:
        `torch.Tensor`: The mean, or 0 if no value counts.
    """
    mask = torch.ones_like(tensor, dtype=torch.bool) if mask is None else mask.bool()
    return torch.where(mask, tensor, 0).sum(dim) / mask.sum(dim).clamp(min=1)
