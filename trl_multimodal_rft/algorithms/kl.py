# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Estimates of the KL divergence from the reference policy, and controllers of its coefficient."""

import math

import torch


# Upper bound of log(reference / policy) in k3, in nats
_LARGEST_LOG_RATIO = 20.0

# Of `AdaptiveKLController`: smallest factor of an update, and smallest coefficient after an update
_SMALLEST_FACTOR = 0.1
_SMALLEST_COEF = 1e-8


def _k1(d: torch.Tensor) -> torch.Tensor:
    """Estimates KL as $d$, see [Fine-Tuning Language Models from Human Preferences](https://huggingface.co/papers/1909.08593)."""
    return d


def _k2(d: torch.Tensor) -> torch.Tensor:
    """Estimates KL as $d^2 / 2$, see [REINFORCE++](https://huggingface.co/papers/2501.03262)."""
    return d.square() / 2


def _k3(d: torch.Tensor) -> torch.Tensor:
    """Estimates KL as $e^{-d} - 1 + d$, see [DeepSeekMath](https://huggingface.co/papers/2402.03300)."""
    d = d.clamp(min=-_LARGEST_LOG_RATIO)
    return (-d).exp() - 1 + d


# Functions of the log-ratio $d$ of policy to reference, see `approx_kl`
KL_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}


def approx_kl(logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, estimator: str) -> torch.Tensor:
    r"""
    Estimates $\mathrm{KL}(\pi \| \pi_\mathrm{ref})$ at each token sampled from $\pi$, with
    $d = \log \pi - \log \pi_\mathrm{ref}$, see [Approximating KL divergence](http://joschu.net/blog/kl-approx.html).

    As a reward, only k1 gives the gradient of the divergence. As a loss, k1 has the gradient 0 on average, k2 the
    gradient of $\mathrm{KL}(\pi \| \pi_\mathrm{ref})$, and k3 the gradient of $\mathrm{KL}(\pi_\mathrm{ref} \| \pi)$.

    Args:
        logps, ref_logps (`torch.Tensor`):
            Log-probabilities under the policy and under the reference, shape `(B, T)`.
        mask (`torch.Tensor`):
            1 on the tokens that count, shape `(B, T)`. Values of other tokens are ignored, even if infinite.
        estimator (`str`):
            `"k1"` is $d$, `"k2"` is $d^2 / 2$, `"k3"` is $e^{-d} - 1 + d$.

    Returns:
        `torch.Tensor`: The estimate, shape `(B, T)`, 0 outside the mask.
    """
    mask = mask.bool()
    return KL_ESTIMATORS[estimator](torch.where(mask, logps, 0) - torch.where(mask, ref_logps, 0))


class FixedKLController:
    """
    A constant KL coefficient.

    Args:
        value (`float`):
            The coefficient.
    """

    def __init__(self, value: float):
        self.value = value

    def update(self, kl: float, n_samples: int) -> None:
        """
        Does nothing. Trainers call this method after each optimizer step.

        Args:
            kl (`float`):
                Mean divergence over all tokens of all processes, in nats.
            n_samples (`int`):
                Number of completions since the last update, over all processes.
        """

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        """
        Restores a state that [`state_dict`] returned.

        Args:
            state (`dict`):
                The state.
        """
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    r"""
    A KL coefficient that rises while the divergence is above a target, and falls while the divergence is below, see
    [Fine-Tuning Language Models from Human Preferences](https://huggingface.co/papers/1909.08593):
    $\beta \leftarrow \beta (1 + \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, \pm 0.2) \cdot n / h)$ with $n$
    completions since the last update, and the horizon $h$. The factor of $\beta$ is at least 0.1, so $\beta$ stays
    positive.

    Args:
        value (`float`):
            Initial coefficient, above 0.
        target (`float`):
            Divergence at which the coefficient stays as it is, in nats per token, above 0.
        horizon (`int`):
            $h$, above 0: after $h$ completions, the coefficient has changed by about 20 % at most.

    Raises:
        `ValueError`: If `value`, `target` or `horizon` isn't above 0.
    """

    def __init__(self, value: float, target: float, horizon: int):
        for name, number in (("value", value), ("target", target), ("horizon", horizon)):
            if not number > 0:
                raise ValueError(f"`{name}` must be above 0, got {number}.")
        super().__init__(value)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n_samples: int) -> None:
        """Adapts the coefficient, see [`FixedKLController.update`]; ignores a divergence that isn't finite."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        factor = max(1 + error * n_samples / self.horizon, _SMALLEST_FACTOR)
        self.value = max(self.value * factor, _SMALLEST_COEF)
