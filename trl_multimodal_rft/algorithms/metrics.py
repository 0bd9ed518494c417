# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of a run: how the numbers of ranks become one value, and the log to which all metrics are written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Metric:
    """A metric over all ranks: numbers of each rank, and the function that combines them."""

    numbers: torch.Tensor  # `K` numbers of this rank, such as a sum and a count, `(K,)`
    combine: Callable[[torch.Tensor], torch.Tensor]  # from the numbers of all ranks, `(ranks, K)`, to a scalar
    # Combines the values of all micro-batches between two logs into one value. With `None`, TRL logs their mean.
    merge: Callable[[list[float]], float] | None = None
    skips_nan: bool = False  # whether NaN is left out of the log


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """
    Returns the metric of a mean: of values `(B, T)` over the mask's tokens, or of values `(B,)` or `(B, 1)` over
    completions.
    """
    if values.shape != mask.shape:
        mask = torch.ones_like(values)
    total = torch.where(mask.bool(), values.detach(), 0).sum()
    return share(total, mask.sum())


def share(count: torch.Tensor, total: torch.Tensor) -> Metric:
    """Returns the metric of a ratio of two scalars, each of which is a sum over ranks. It is 0 where the second is."""
    return Metric(torch.stack([count.float(), total.float()]), _ratio)


def scored_mean(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """Returns the metric of [`token_mean`], but with an empty mask it is NaN, and isn't logged."""
    metric = token_mean(values, mask)
    return Metric(metric.numbers, lambda numbers: numbers.sum(0)[0] / numbers.sum(0)[1], skips_nan=True)


def rank_mean(value: torch.Tensor) -> Metric:
    """Returns the metric of the mean of a scalar over the ranks where it isn't NaN."""
    return Metric(value.detach().reshape(1), torch.nanmean)


def largest(values: torch.Tensor, merge: Callable[[list[float]], float] | None = None) -> Metric:
    """Returns the metric of the largest value that isn't NaN, or NaN if all values are."""
    return Metric(_nanmax(values.detach()).reshape(1), _nanmax, merge)


def smallest(values: torch.Tensor) -> Metric:
    """Returns the metric of the smallest value that isn't NaN, or NaN if all values are."""
    return Metric(_nanmax(-values.detach()).reshape(1), lambda numbers: -_nanmax(numbers))


def completion_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Returns the mean of each completion's tokens, `(B,)`, NaN if no token counts. Values `(B, 1)` are means already.
    """
    if values.shape != mask.shape:
        return values.squeeze(1).float()
    return (values * mask).sum(1) / mask.sum(1)


@dataclass(frozen=True)
class Latest:
    """A number that takes the place of earlier ones since the last log, such as a count of the whole run."""

    number: float


class MetricLog:
    """
    Log to which a trainer writes its metrics by [`add`]. TRL logs the mean of a metric's values since its last log.

    Args:
        by_mode (`Mapping[str, dict[str, list[float]]]`):
            TRL's `_metrics`: values by name, in training (`"train"`) and in evaluation (`"eval"`).
        is_training (`Callable`):
            Function that returns whether the current mode is training.
        gather (`Callable`):
            Function that gathers tensors of all ranks.
    """

    def __init__(
        self, by_mode: Mapping[str, dict[str, list[float]]], is_training: Callable[[], bool], gather: Callable
    ):
        self.by_mode = by_mode
        self._is_training = is_training
        self._gather = gather
        # Metrics by name, the numbers of all of them on all ranks, `(ranks, sum of K)`, and the mode's values
        self._pending: list[tuple[dict[str, Metric], torch.Tensor, dict[str, list[float]]]] = []

    @property
    def current(self) -> dict[str, list[float]]:
        """Values of the current mode, by name."""
        return self.by_mode["train" if self._is_training() else "eval"]

    def add(
        self, metrics: Mapping[str, Metric | Latest | float], mode: Literal["train", "eval"] | None = None
    ) -> None:
        """
        Writes metrics of a mode, by default the current one.

        A [`Metric`] says how the numbers of ranks are reduced. They are gathered here, in one call for all metrics,
        and stay on the device until [`read`], as the host would have to wait for them between the forward and the
        backward pass. All ranks must pass the same names. A plain number is written at once and as it is: ranks have
        reduced it, or each logs its own.
        """
        values_by_name = self.current if mode is None else self.by_mode[mode]
        to_reduce = {}
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                to_reduce[name] = metric
            elif isinstance(metric, Latest):
                values_by_name[name] = [metric.number]
            else:
                values_by_name[name].append(metric)
        if to_reduce:
            numbers = torch.cat([metric.numbers.float() for metric in to_reduce.values()])
            self._pending.append((to_reduce, self._gather(numbers[None]), values_by_name))

    def replace_last(self, name: str, value: float | None) -> None:
        """Replaces the value that TRL has written last in the current mode. `None` removes it."""
        values = self.current[name]
        values[-1:] = [] if value is None else [value]
        if not values:
            del self.current[name]  # TRL would log the mean of an empty list

    def read(self) -> None:
        """Reads the metrics of ranks from the device, and writes their values."""
        pending = self._pending
        self._pending = []
        if not pending:
            return
        widths = [numbers.size(1) for _, numbers, _ in pending]
        gathered = torch.cat([numbers for _, numbers, _ in pending], dim=1).cpu().double().split(widths, dim=1)
        for (metrics, _, values_by_name), rank_numbers in zip(pending, gathered, strict=True):
            numbers_per_metric = rank_numbers.split([len(metric.numbers) for metric in metrics.values()], dim=1)
            for (name, metric), metric_numbers in zip(metrics.items(), numbers_per_metric, strict=True):
                value = metric.combine(metric_numbers).item()
                if metric.skips_nan and math.isnan(value):
                    continue
                if metric.merge is None:
                    values_by_name[name].append(value)
                else:
                    values_by_name[name] = [metric.merge([value, *values_by_name[name]])]


class MicroBatchSums:
    """Sums over the micro-batches of an optimizer step."""

    def __init__(self):
        self._sums: torch.Tensor | None = None

    def add(self, *numbers: torch.Tensor | float) -> None:
        """Adds the numbers of a micro-batch. At least one is a tensor, whose device the sums are on."""
        tensors = [number for number in numbers if isinstance(number, torch.Tensor)]
        values = torch.stack(
            [torch.as_tensor(number, device=tensors[0].device).detach().float() for number in numbers]
        )
        self._sums = values if self._sums is None else self._sums + values

    def pop(self, reduce: Callable) -> list[float]:
        """Returns the sums over all ranks (an empty list if nothing was added), and resets them."""
        sums = self._sums
        self._sums = None
        return [] if sums is None else reduce(sums, reduction="sum").tolist()


def _ratio(numbers: torch.Tensor) -> torch.Tensor:
    """Combines sums and counts of ranks, `(ranks, 2)`, to a mean, 0 without a count."""
    total, count = numbers.sum(0)
    return total / count.clamp(min=1)


def _nanmax(values: torch.Tensor) -> torch.Tensor:
    # TRL's functions would make the host wait for the device
    nan = values.isnan()
    return torch.where(nan.all(), torch.nan, torch.where(nan, -torch.inf, values).max())
