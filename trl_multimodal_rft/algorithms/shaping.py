# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shaping of rewards before the advantage estimator."""

import torch

from .returns import TOLERANCE


# Reward above which a completion counts as right, as in the code of Video-R1
_RIGHT_ABOVE = 0.1


def contrast_bonus(
    rewards: torch.Tensor, contrast_rewards: torch.Tensor, group_size: int, *, ratio: float, bonus: float
) -> torch.Tensor:
    """
    Returns the temporal reward of T-GRPO, see [Video-R1](https://huggingface.co/papers/2503.21776), `(N,)`: right
    completions get `bonus` if the mean reward of their group is at least `ratio` times that under the view. Missing
    `contrast_rewards` are NaN.
    """
    means, contrast_means = (values.view(-1, group_size).nanmean(1) for values in (rewards, contrast_rewards))
    gets_bonus = (means >= ratio * contrast_means).repeat_interleave(group_size)  # comparisons with NaN are false
    return torch.where(gets_bonus & (rewards > _RIGHT_ABOVE), bonus, 0.0)


class RunningScale:
    """
    Running standard deviation of all rewards of the run so far, the divisor of rewards in
    [Implementation Matters in Deep Policy Gradients](https://huggingface.co/papers/2005.12729). The split of rewards
    over calls of [`update`] doesn't change the result.
    """

    def __init__(self):
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared deviations from the mean

    def update(self, rewards: torch.Tensor) -> None:
        """
        Updates the count, the mean and the squared deviations with further rewards.

        Args:
            rewards (`torch.Tensor`):
                Rewards of all ranks, `NaN` where unscorable, shape `(N,)`.
        """
        rewards = rewards[~rewards.isnan()].double()
        if len(rewards) == 0:
            return
        # Chan's formula joins the mean and the squares of two sets: the rewards so far, and the further ones
        mean = rewards.mean().item()
        total = self.count + len(rewards)
        shift = mean - self.mean
        self.squares += (rewards - mean).square().sum().item() + shift**2 * self.count * len(rewards) / total
        self.mean += shift * len(rewards) / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 as long as all rewards have been equal."""
        std = (self.squares / max(self.count - 1, 1)) ** 0.5
        return std if std > TOLERANCE * max(abs(self.mean), 1) else 1.0

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict) -> None:
        """
        Restores a state that [`state_dict`] returned.

        Args:
            state (`dict`):
                The state.
        """
        self.count = state["count"]
        self.mean = state["mean"]
        self.squares = state["squares"]


def shape_rewards(
    rewards: torch.Tensor, scale: RunningScale | None, clip_range: tuple[float, float] | None
) -> torch.Tensor:
    """Returns rewards divided by the deviation of a running scale, if any, and then clipped to a range, if any."""
    shaped = rewards if scale is None else rewards / scale.std
    return shaped if clip_range is None else shaped.clamp(*clip_range)
