# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shaping of rewards before the advantage estimator."""

import torch

from .returns import TOLERANCE


# Reward above which a completion counts as right, as in the code of Video-R1
_RIGHT = 0.1


def contrast_bonus(
    rewards: torch.Tensor, contrast_rewards: torch.Tensor, group_size: int, *, ratio: float, bonus: float
) -> torch.Tensor:
    r"""
    Returns the temporal reward of T-GRPO, see [Video-R1](https://huggingface.co/papers/2503.21776): right completions
    get a bonus if the mean reward of their group is at least $\mu$ times the mean reward of completions from a view.

    Args:
        rewards (`torch.Tensor`):
            Rewards of all processes, group by group, `NaN` where unscorable, shape `(N,)`.
        contrast_rewards (`torch.Tensor`):
            Rewards of completions from the view, shape `(N,)`. Those of one prompt stand among the `group_size`
            entries of its group, in any order. Unused entries are `NaN`.
        group_size (`int`):
            Completions per prompt.
        ratio (`float`):
            $\mu$.
        bonus (`float`):
            $\alpha$.

    Returns:
        `torch.Tensor`: The bonus, 0 in groups without a contrast, shape `(N,)`.
    """
    means, contrast_means = (values.view(-1, group_size).nanmean(1) for values in (rewards, contrast_rewards))
    gets_bonus = (means >= ratio * contrast_means).repeat_interleave(group_size)  # comparisons with NaN are false
    return torch.where(gets_bonus & (rewards > _RIGHT), bonus, 0.0)


class RunningScale:
    """
    The standard deviation of all rewards of the run so far, by which rewards are divided, see
    [Implementation Matters in Deep Policy Gradients](https://huggingface.co/papers/2005.12729). The result doesn't
    depend on how rewards are split over calls of [`update`].
    """

    def __init__(self):
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared deviations from the mean

    def update(self, rewards: torch.Tensor) -> None:
        """
        Adds rewards to the moments.

        Args:
            rewards (`torch.Tensor`):
                Rewards of all processes, `NaN` where unscorable, shape `(N,)`.
        """
        rewards = rewards[~rewards.isnan()].double()
        if len(rewards) == 0:
            return
        mean, total = rewards.mean().item(), self.count + len(rewards)
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
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
