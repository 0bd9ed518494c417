# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Losses that prefer a completion after its media to the same completion after a view of the media."""

import torch
from torch.nn.functional import logsigmoid


def conditional_preference(chosen: torch.Tensor, view: torch.Tensor, beta: float) -> torch.Tensor:
    r"""
    Computes the conditional preference loss of [mDPO](https://huggingface.co/papers/2406.11839),

    $$-\log \sigma\left(\beta \log \frac{\pi(y \mid m, x)}{\pi_\mathrm{ref}(y \mid m, x)}
    - \beta \log \frac{\pi(y \mid \tilde{m}, x)}{\pi_\mathrm{ref}(y \mid \tilde{m}, x)}\right),$$

    which prefers a chosen completion $y$ after the media $m$ to the same completion after a view $\tilde{m}$.

    Args:
        chosen, view (`torch.Tensor`):
            Log-probabilities of the `V` completions under the policy minus under the reference, after the media and
            after the view, shape `(V,)`.
        beta (`float`):
            $\beta$.

    Returns:
        `torch.Tensor`: The loss of each completion, shape `(V,)`.
    """
    return -logsigmoid(beta * (chosen - view))


def anchored_preference(chosen: torch.Tensor, beta: float, anchor: float = 0.0) -> torch.Tensor:
    r"""
    Computes the anchored preference loss of [mDPO](https://huggingface.co/papers/2406.11839), which keeps the reward
    of a chosen completion above an anchor $\delta$:

    $$-\log \sigma\left(\beta \log \frac{\pi(y \mid m, x)}{\pi_\mathrm{ref}(y \mid m, x)} - \delta\right).$$

    Args:
        chosen (`torch.Tensor`):
            Log-probabilities of the `V` completions under the policy minus under the reference, shape `(V,)`.
        beta (`float`):
            $\beta$.
        anchor (`float`, *optional*, defaults to `0.0`):
            $\delta$.

    Returns:
        `torch.Tensor`: The loss of each completion, shape `(V,)`.
    """
    return -logsigmoid(beta * chosen - anchor)
