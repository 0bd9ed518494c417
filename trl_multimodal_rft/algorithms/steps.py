# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards along completions: what estimators read of the steps in which completions are rewarded."""

from dataclasses import dataclass

import torch

from .returns import cumulative_returns


@dataclass(eq=False)
class Steps:
    """
    The `S` steps of `N` completions, in their order, on the CPU. A step ends with a turn, or where a reward function
    says.
    """

    completions: torch.Tensor  # batch index of each step's completion, (S,)
    ends: torch.Tensor  # index of its last token, (S,)
    turns: torch.Tensor  # number of its turn in the completion, (S,)
    rewards: torch.Tensor  # weighted, NaN where no function rewards it, (S,), float64
    outcomes: torch.Tensor  # weighted rewards of whole completions, NaN where no function gives one, (N,), float64
    states: torch.Tensor | None = None  # equal numbers for turns that answer the same, (S,)

    @classmethod
    def of_completions(cls, rewards: torch.Tensor, mask: torch.Tensor) -> "Steps":
        """Completions that are one step each, of rewards `(N,)` and a mask `(N, T)`."""
        n, positions = len(rewards), torch.arange(mask.size(1))
        ends = torch.where(mask.cpu().bool(), positions, 0).amax(1)
        none = torch.full((n,), torch.nan, dtype=torch.float64)
        index, zeros = torch.arange(n), torch.zeros(n, dtype=torch.long)
        return cls(index, ends, zeros, none, rewards.cpu().double(), zeros)

    @property
    def counts(self) -> torch.Tensor:
        """Steps of each completion, `(N,)`."""
        return self.completions.bincount(minlength=len(self.outcomes))

    @property
    def numbers(self) -> torch.Tensor:
        """Number of each step in its completion, `(S,)`."""
        return torch.arange(len(self.ends)) - (self.counts.cumsum(0) - self.counts)[self.completions]

    def of_turns(self) -> "Steps":
        """Whole turns, with the sums of the rewards of their steps."""
        keys = self.completions * (self.turns.amax() + 1) + self.turns
        _, index = keys.unique(return_inverse=True)
        last = torch.cat([keys[1:] != keys[:-1], torch.ones(1, dtype=torch.bool)])
        rewards = torch.zeros(int(last.sum()), dtype=torch.float64).index_add(0, index, self.rewards.nan_to_num(0.0))
        states = None if self.states is None else self.states[last]
        return Steps(self.completions[last], self.ends[last], self.turns[last], rewards, self.outcomes, states)

    def returns(self, discount: float) -> torch.Tensor:
        """Reward of each step and of what follows it, discounted per step; the outcome is one of the last, `(S,)`."""
        numbers, counts = self.numbers, self.counts
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.float64)
        table[self.completions, numbers] = self.rewards.nan_to_num(0.0)
        table[torch.arange(len(counts)), counts - 1] += self.outcomes.nan_to_num(0.0)
        mask = torch.arange(table.size(1)) < counts[:, None]
        return cumulative_returns(table, mask, discount)[self.completions, numbers]

    def on_tokens(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The value `(S,)` of each token's step, 0 outside the mask. Shapes: `mask` `(N, T)`; returns `(N, T)`."""
        ended = torch.zeros(mask.size(0), mask.size(1) + 1, dtype=torch.long)
        ended[self.completions, self.ends + 1] = 1
        counts = self.counts
        within = torch.minimum(ended.cumsum(1)[:, :-1], counts[:, None] - 1)
        return torch.where(mask.cpu().bool(), values[(counts.cumsum(0) - counts)[:, None] + within], 0)
