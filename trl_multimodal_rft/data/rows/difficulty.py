# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampling of rows by their difficulty, which is measured during the run."""

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import torch
from datasets import Dataset

from .cells import finite_number


# Column with the share of right completions of each row
PASS_RATE = "pass_rate"

# Smallest weight of a row (the largest is 1), and weight of the newest measurement in a row's pass rate
_SMALLEST_WEIGHT = 0.1
_NEWEST_WEIGHT = 0.5


class DifficultySampler:
    """
    Random sampler of rows by how often the policy solves them, after the curriculum (RLCS) of
    [GLM-4.1V-Thinking](https://huggingface.co/papers/2507.01006), whose report has no numbers: pass rate p weighs
    max(4p(1 - p), 0.1). Batch n is drawn when batch n - `n_prefetched` is read, from measurements before it.
    """

    def __init__(
        self,
        n_rows: int,
        batch_size: int,
        seed: int = 0,
        n_prefetched: int = 0,
        pass_rates: Sequence[float | None] | None = None,  # by row, `None` where unknown
    ):
        rates = [None] * n_rows if pass_rates is None else pass_rates
        rates = [finite_number(rate, PASS_RATE, row_index) for row_index, rate in enumerate(rates)]
        for row_index, rate in enumerate(rates):
            if rate is not None and not 0 <= rate <= 1:
                raise ValueError(
                    f"row {row_index}: the column `{PASS_RATE}` must be between 0 and 1, got {rate!r}; correct "
                    "the value, or remove the column."
                )
        self.rates = torch.tensor([math.nan if value is None else value for value in rates], dtype=torch.float64)
        self._batch_size = batch_size
        self._seed = seed
        self._n_prefetched = n_prefetched
        self._drawn_rows: dict[int, list[int]] = {}  # row indices by the index of the batch in the run

    def rows(self, batch_index: int, left_out: Collection[int] = ()) -> list[int]:
        """
        Returns the row indices of a batch. Draws it and the batches to prefetch. Rows in `left_out` are only drawn if
        fewer rows than a batch remain, so that a batch is always full. The trainer replaces them.
        """
        for index in range(batch_index, batch_index + self._n_prefetched + 1):
            if index not in self._drawn_rows:
                self._drawn_rows[index] = self._draw(index, left_out)
        self._drawn_rows = {index: rows for index, rows in self._drawn_rows.items() if index >= batch_index}
        return self._drawn_rows[batch_index]

    def coming(self, batch_indices: range) -> list[list[int]]:
        """Returns the row indices of the batches in `batch_indices` that are already drawn."""
        return [self._drawn_rows[batch_index] for batch_index in batch_indices if batch_index in self._drawn_rows]

    def _draw(self, batch_index: int, left_out: Collection[int]) -> list[int]:
        weights = (4 * self.rates * (1 - self.rates)).clamp(min=_SMALLEST_WEIGHT).nan_to_num(nan=1.0)
        # A weight of 0 gives a key of minus infinity below, so that these rows come last, after all others are drawn
        weights[list(left_out)] = 0
        generator = torch.Generator().manual_seed(random.Random(f"{self._seed} {batch_index}").getrandbits(63))
        # Weighted sampling without replacement: the rows with the largest log(u) / weight, for u uniform in 0 to 1
        # (https://doi.org/10.1016/j.ipl.2005.11.003)
        keys = torch.rand(len(weights), generator=generator, dtype=torch.float64).log() / weights
        return keys.topk(self._batch_size).indices.tolist()

    def update_pass_rates(self, row_indices: torch.Tensor, rewards: torch.Tensor) -> None:
        """
        Updates the pass rates of rows by rewards of their completions, where 1 is right and 0 is wrong.

        Shapes: `row_indices` and `rewards` `(N,)`, for the completions of all processes. NaN is a missing reward.
        """
        row_indices = row_indices.cpu()
        rewards = rewards.double().cpu().clamp(0, 1)
        has_reward = ~rewards.isnan()
        measured_rows, inverse = row_indices[has_reward].unique(return_inverse=True)
        reward_sums, n_rewards = torch.zeros(2, len(measured_rows), dtype=torch.float64)
        reward_sums.index_add_(0, inverse, rewards[has_reward])
        n_rewards.index_add_(0, inverse, torch.ones_like(rewards[has_reward]))
        pass_rates = reward_sums / n_rewards
        old_rates = self.rates[measured_rows]
        self.rates[measured_rows] = torch.where(
            old_rates.isnan(), pass_rates, _NEWEST_WEIGHT * pass_rates + (1 - _NEWEST_WEIGHT) * old_rates
        )

    def coverage(self) -> tuple[float, float]:
        """Returns the share of rows whose pass rate is known, and the mean of these rates, 0 if none is known."""
        is_known = ~self.rates.isnan()
        return is_known.double().mean().item(), self.rates[is_known].mean().item() if is_known.any() else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "drawn": self._drawn_rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a [`state_dict`]. Ignores a state with another number of rows, and batches of another size."""
        if len(state["rates"]) != len(self.rates):
            return
        self.rates = state["rates"]
        self._drawn_rows = {
            batch_index: rows for batch_index, rows in state["drawn"].items() if len(rows) == self._batch_size
        }


def difficulty_sampler(dataset: Dataset, batch_size: int, seed: int, n_prefetched: int) -> DifficultySampler:
    """Returns a sampler of the rows of a dataset, with the pass rates of its column `pass_rate`, if there is one."""
    pass_rates = None
    if PASS_RATE in dataset.column_names:
        pass_rates = dataset.select_columns([PASS_RATE]).with_format(None)[PASS_RATE][:]
    return DifficultySampler(len(dataset), batch_size, seed, n_prefetched, pass_rates)
