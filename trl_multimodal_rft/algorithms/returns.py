# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Per-token rewards, rewards along completions, returns, and whitening.

A batch has `N` completions of up to `T` tokens. Masks may have gaps, and padding on either side. Results are exactly 0
outside the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from .kl import approx_kl


# Numbers that differ by less count as equal, since rounding makes float32 sums of the same rewards depend on their
# order. The tolerance is absolute up to a mean of 1, and relative to larger means.
TOLERANCE = 1e-6


def terminal_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns token rewards `(N, T)`: each completion's reward `(N,)` on its last token of the mask, 0 elsewhere."""
    mask = mask.bool()
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, rewards[:, None], 0)


def token_rewards(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    """
    Returns token rewards: the completion's reward on its last token, minus the KL penalty (k1) of each token.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`. `NaN` (unscorable) counts as 0.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        old_logps, ref_logps (`torch.Tensor`, *optional*):
            Log-probabilities under the policy that sampled and under the reference, shape `(N, T)`.
        kl_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the penalty.

    Returns:
        `torch.Tensor`: Reward of each token, shape `(N, T)`, 0 outside the mask.
    """
    terminal = terminal_rewards(rewards.nan_to_num(), mask)
    if kl_coef == 0:
        return terminal
    assert old_logps is not None
    assert ref_logps is not None
    return terminal - kl_coef * approx_kl(old_logps, ref_logps, mask, "k1")


def cumulative_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    r"""
    Returns the discounted sum of the rewards from each token on, $G_t = r_t + \gamma G_{t+1}$, over valid tokens only.

    Args:
        rewards (`torch.Tensor`):
            Reward of each token, shape `(N, T)`.
        mask (`torch.Tensor`):
            1 on valid tokens, shape `(N, T)`.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per valid token.

    Returns:
        `torch.Tensor`: Returns, shape `(N, T)`, 0 outside the mask.
    """
    mask = mask.bool()
    width = mask.size(1)
    # Moves valid tokens to the front, and other tokens to a spare column, which is cut off: with the mask `[0, 1, 0,
    # 1]`, the tokens' new columns are `[4, 0, 4, 1]`
    column = torch.where(mask, mask.cumsum(1) - 1, width)
    sums = rewards.new_zeros(len(rewards), width + 1).scatter(1, column, torch.where(mask, rewards, 0))[:, :width]
    window = 1
    # `sums[:, t]` covers `window` tokens from `t` on. Windows double, as a loop over tokens would launch more kernels.
    while window < width:
        sums[:, :-window] += gamma**window * sums[:, window:]
        window *= 2
    return torch.where(mask, sums.gather(1, column.clamp(max=width - 1)), 0)


class Step(NamedTuple):
    """A turn of a completion, or a part of a turn, with its reward. A step begins after the previous step's end."""

    end: int  # index of the step's last token, -1 for the only step of a completion without tokens
    turn: int  # index of the step's turn in the completion
    reward: float | None  # weighted sum of the step's rewards by all functions, `None` without any
    state: int  # id of the prompt or tool results before the step's turn, if the estimator takes states


@dataclass(eq=False)
class Steps:
    """The `S` steps of `N` completions, in order."""

    steps: list[list[Step]]  # at least one per completion
    outcomes: torch.Tensor  # weighted rewards of whole completions, NaN without any, `(N,)`, float64

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the batch index of each step's completion, and the step's index in the completion, `(S,)`."""
        index_pairs = []
        for i, steps in enumerate(self.steps):
            index_pairs += [(i, k) for k in range(len(steps))]
        batch_indices, step_indices = torch.tensor(index_pairs).unbind(1)
        return batch_indices, step_indices

    def merge_turns(self) -> "Steps":
        """Merges the steps of each turn into one step, with the sum of their rewards."""
        # `turns[i][j]` lists the steps of turn j of completion i. The merged step ends where its last step ends.
        turns = [[[*turn] for _, turn in groupby(steps, lambda step: step.turn)] for steps in self.steps]
        merged = [
            [turn[-1]._replace(reward=sum(step.reward or 0 for step in turn)) for turn in completion]
            for completion in turns
        ]
        return Steps(merged, self.outcomes)

    def returns(self, discount: float) -> torch.Tensor:
        """
        Returns the discounted sum of rewards from each step on, `(S,)`. The last reward includes the outcome. Rewards
        0 and 1 with the outcome 2 and a discount of 0.5 give 1.5 and 3.
        """
        totals: list[float] = []
        for steps, outcome in zip(self.steps, self.outcomes.nan_to_num(0.0).tolist(), strict=True):
            rewards = [step.reward or 0.0 for step in reversed(steps)]
            rewards[0] += outcome
            totals += [*accumulate(rewards, lambda later, reward: reward + discount * later)][::-1]
        return torch.tensor(totals, dtype=torch.float64)

    def on_tokens(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Returns values of steps `(S,)` on all tokens of each step, `(N, T)`, 0 outside the mask `(N, T)`. The values 5
        and 7 of steps that end at tokens 0 and 2 give `[5, 7, 7]`.
        """
        token_values = torch.zeros(mask.shape, dtype=torch.float64)
        step_values = iter(values)
        for completion_values, steps in zip(token_values, self.steps, strict=True):
            for start, step in zip([0, *(step.end + 1 for step in steps)], steps, strict=False):
                completion_values[start : step.end + 1] = next(step_values)
        return torch.where(mask.cpu().bool(), token_values, 0)


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None = None,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    scales: bool = True,
) -> torch.Tensor:
    """
    Shifts and scales values to mean 0 and population variance 1 over the whole mask.

    Args:
        values, mask (`torch.Tensor`):
            Values, and 1 on the values that count, of the same shape.
        weights (`torch.Tensor`, *optional*):
            How often each value counts in mean and variance, of the same shape; by default once in the mask, and not
            outside. Values outside the mask count as 0.
        reduce (`Callable`, *optional*):
            Function that sums a tensor over processes, so that mean and variance are over all processes.
        scales (`bool`, *optional*, defaults to `True`):
            Whether to scale values. Otherwise, they are only shifted.

    Returns:
        `torch.Tensor`: Whitened values, 0 outside the mask; all 0 if the values are equal.
    """
    mask = mask.bool()
    values = torch.where(mask, values, 0)
    weights = mask if weights is None else weights

    def mean(x: torch.Tensor) -> torch.Tensor:
        total, count = reduce(torch.stack([(x * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)]))
        return total / count.clamp(min=1)

    # Two passes keep the precision for means far from 0: `offset` is the mean that rounding leaves in `centred`
    shift = mean(values)
    centred = values - shift.to(values.dtype)
    offset = mean(centred)
    if not scales:
        return torch.where(mask, centred - offset, 0).to(values.dtype)
    std = (mean(centred.square()) - offset.square()).clamp(min=0).sqrt()
    if std <= TOLERANCE * shift.abs().clamp(min=1):
        return torch.zeros_like(values)
    return torch.where(mask, (centred - offset) / std, 0).to(values.dtype)
