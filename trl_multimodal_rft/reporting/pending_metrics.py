# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of all processes from one exchange, for which each would wait otherwise."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from trl.trainer.utils import nanmax, nanmin


class PendingMetrics:
    """Numbers of this process that wait for those of the others."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._pending: list[tuple[Callable[[float], None], torch.Tensor, Callable]] = []

    def add(self, take: Callable[[float], None], numbers: torch.Tensor, combine: Callable) -> None:
        """
        Adds a metric.

        Shapes: `numbers` `(K,)`, `combine` `(P,)`.
        """
        self._pending.append((take, numbers.detach(), combine))

    def add_token_mean(self, take: Callable[[float], None], values: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds a mean over valid tokens."""
        total = torch.where(mask.bool(), values, 0).sum()
        self.add(take, torch.stack([total, mask.sum().float()]), _ratio)

    def add_extreme(self, take: Callable[[float], None], values: torch.Tensor, largest: bool) -> None:
        """Adds the smallest or the largest of the values that aren't NaN, or NaN if all are."""
        # TRL's functions would wait for the device here
        nan = values.isnan()
        best = torch.where(nan, -torch.inf, values).max() if largest else torch.where(nan, torch.inf, values).min()
        self.add(take, torch.where(nan.all(), torch.nan, best), nanmax if largest else nanmin)

    def gather(self) -> None:
        """Exchanges all numbers at once, and hands out the metrics, which all processes must have added alike."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        numbers = torch.cat([own.flatten() for _, own, _ in pending])
        everyone = self.accelerator.gather(numbers[None]).cpu().double()
        parts = everyone.split([own.numel() for _, own, _ in pending], dim=1)
        for part, (take, own, combine) in zip(parts, pending, strict=True):
            take(combine(part if own.dim() else part[:, 0]).item())

    def clear(self) -> None:
        """Forgets what waits."""
        self._pending.clear()


def _ratio(numbers: torch.Tensor) -> torch.Tensor:
    total, count = numbers.sum(0)
    return total / count.clamp(min=1)
