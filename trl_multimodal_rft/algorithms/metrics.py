# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of a run as numbers that add up, and the log to which all metrics are written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch


@dataclass(frozen=True)
class Metric:
    """
    A metric as numbers of a rank and a micro-batch, such as a sum and a count, and how they become its value. So the
    value doesn't depend on how rows are split into batches and over ranks.
    """

    numbers: torch.Tensor  # `(K,)`
    kind: str = "mean"  # a name in `KINDS`
    is_of_all_ranks: bool = False  # whether `numbers` are those of all ranks already
    skips_nan: bool = False  # whether a value of NaN is left out of the log

    @property
    def value(self) -> torch.Tensor:
        """The value of the numbers, a scalar."""
        return KINDS[self.kind].value(self.numbers)


def share(part: torch.Tensor | float, total: torch.Tensor | float, *, is_of_all_ranks: bool = False) -> Metric:
    """Returns the metric of a ratio of two scalars. It is 0 where the second is."""
    return Metric(_stacked(part, total), "share", is_of_all_ranks)


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """
    Returns the metric of a mean: of values `(B, T)` over the mask's tokens, or of values `(B,)` or `(B, 1)` over
    completions. It is 0 if nothing counts.
    """
    if values.shape != mask.shape:
        mask = torch.ones_like(values)
    total = torch.where(mask.bool(), values.detach(), 0).sum()
    return share(total, mask.sum())


def scored_mean(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """Returns the metric of [`token_mean`], but with an empty mask it is NaN, and isn't logged."""
    return Metric(token_mean(values, mask).numbers, skips_nan=True)


def nan_mean(values: torch.Tensor, *, is_of_all_ranks: bool = False) -> Metric:
    """Returns the metric of the mean of the values that aren't NaN. Without any, it is NaN."""
    values = values.detach().float()
    numbers = torch.stack([values.nansum(), (~values.isnan()).sum().float()])
    return Metric(numbers, is_of_all_ranks=is_of_all_ranks)


def weighted_mean(
    value: torch.Tensor | float, weight: torch.Tensor | float, *, is_of_all_ranks: bool = False
) -> Metric:
    """Returns the metric of the mean of a scalar, which is itself a mean of `weight` rows or tokens."""
    mean, n = _stacked(value, weight)
    # A rank without rows may have a mean of NaN
    return Metric(torch.stack([torch.where(n > 0, mean * n, 0), n]), is_of_all_ranks=is_of_all_ranks)


def average(number: float) -> Metric:
    """Returns the metric of a number of a batch that all ranks have, such as a setting: the mean over batches."""
    return Metric(torch.tensor([number, 1.0], dtype=torch.double), is_of_all_ranks=True)


def latest(number: float) -> Metric:
    """Returns the metric of a number that replaces earlier ones, such as a count of the whole run."""
    return Metric(torch.tensor([number], dtype=torch.double), "latest", is_of_all_ranks=True)


def event_count(number: float) -> Metric:
    """Returns the metric of a number of events on all ranks: those since the last log, or in an evaluation."""
    return Metric(torch.tensor([number], dtype=torch.double), "sum", is_of_all_ranks=True)


def largest(values: torch.Tensor, *, or_zero: bool = False, is_of_all_ranks: bool = False) -> Metric:
    """Returns the metric of the largest value that isn't NaN. Without any, it is NaN or, with `or_zero`, 0."""
    return Metric(_nanmax(values.detach()), "largest_or_zero" if or_zero else "largest", is_of_all_ranks)


def smallest(values: torch.Tensor, *, or_zero: bool = False, is_of_all_ranks: bool = False) -> Metric:
    """Returns the metric of the smallest value that isn't NaN. Without any, it is NaN or, with `or_zero`, 0."""
    return Metric(_nanmax(-values.detach()), "smallest_or_zero" if or_zero else "smallest", is_of_all_ranks)


def deviation(values: torch.Tensor, correction: Literal[0, 1] = 1) -> Metric:
    """
    Returns the metric of the standard deviation of the values of all ranks that aren't NaN, which divides by their
    number minus `correction`.
    """
    return Metric(_moments(values), f"deviation_{correction}", is_of_all_ranks=True)


def explained(errors: torch.Tensor, targets: torch.Tensor) -> Metric:
    """
    Returns the metric of the share of the targets' variance that a prediction with these errors explains. Shapes:
    both `(N,)`, of all ranks.
    """
    return Metric(torch.cat([_moments(errors), _moments(targets)]), "explained_variance", is_of_all_ranks=True)


def _moments(values: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the values that aren't NaN, the sum of squared deviations from it, and their number."""
    values = values.detach().cpu().double()
    values = values[~values.isnan()]
    mean = values.mean() if len(values) else values.new_zeros(())
    return torch.stack([mean, (values - mean).square().sum(), values.new_tensor(len(values))])


def _join_moments(rows: torch.Tensor) -> torch.Tensor:
    """Joins rows of a mean, a sum of squared deviations from it, and a count, `(rows, 3)`."""
    means, squares, counts = rows.unbind(1)
    n = counts.sum()
    # Equal means stay exactly equal, so that equal values have a deviation of 0
    mean = means[0] + (counts * (means - means[0])).sum() / n.clamp(min=1)
    return torch.stack([mean, (squares + counts * (means - mean).square()).sum(), n])


class Kind(NamedTuple):
    """How numbers become a value, and how several rows of numbers become one row."""

    value: Callable[[torch.Tensor], torch.Tensor]  # from `(K,)` to a scalar
    join: Callable[[torch.Tensor], torch.Tensor] = partial(torch.sum, dim=0)  # from `(rows, K)` to `(K,)`


_largest = partial(torch.amax, dim=0)

KINDS = {
    "mean": Kind(lambda n: n[0] / n[1]),  # of a sum and a count
    "share": Kind(lambda n: n[0] / n[1].clamp(min=1)),
    "difference": Kind(lambda n: n[0] / n[1] - n[2] / n[3]),  # of two means
    "sum": Kind(lambda n: n[0]),
    "latest": Kind(lambda n: n[0], lambda rows: rows[-1]),
    # Without values, the numbers are minus infinity. Those of the smallest value are multiplied by -1
    "largest": Kind(lambda n: torch.where(n[0].isneginf(), torch.nan, n[0]), _largest),
    "largest_or_zero": Kind(lambda n: torch.where(n[0].isneginf(), 0, n[0]), _largest),
    "smallest": Kind(lambda n: torch.where(n[0].isneginf(), torch.nan, -n[0]), _largest),
    "smallest_or_zero": Kind(lambda n: torch.where(n[0].isneginf(), 0, -n[0]), _largest),
    # Of moments, see `_moments`
    "deviation_0": Kind(lambda n: (n[1] / n[2]).sqrt(), _join_moments),
    "deviation_1": Kind(lambda n: (n[1] / (n[2] - 1).clamp(min=0)).sqrt(), _join_moments),
    # Of the moments of errors and of returns
    "explained_variance": Kind(
        lambda n: torch.where(n[4] > 0, 1 - n[1] / n[4], torch.nan),
        lambda rows: torch.cat([_join_moments(rows[:, :3]), _join_moments(rows[:, 3:])]),
    ),
}


def completion_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Returns the mean of each completion's tokens, `(B,)`, NaN if no token counts. Values `(B, 1)` are means already.
    """
    if values.shape != mask.shape:
        return values.squeeze(1).float()
    return (values * mask).sum(1) / mask.sum(1)


class MetricLog:
    """
    Log to which a trainer writes its metrics by [`add`]. It joins their numbers until [`pop`].

    Args:
        is_training (`Callable`):
            Function that returns whether the current mode is training.
        gather (`Callable`):
            Function that gathers tensors of all ranks.
    """

    def __init__(self, is_training: Callable[[], bool], gather: Callable):
        self._is_training = is_training
        self._gather = gather
        # Mode, metrics by name, and the gathered numbers of those that aren't of all ranks, `(ranks, sum of K)`
        self._pending: list[tuple[str, dict[str, Metric], torch.Tensor | None]] = []
        self._joined: dict[str, dict[str, Metric]] = {"train": {}, "eval": {}}

    @property
    def mode(self) -> Literal["train", "eval"]:
        """The current mode."""
        return "train" if self._is_training() else "eval"

    def add(self, metrics: Mapping[str, Metric], mode: Literal["train", "eval"] | None = None) -> None:
        """
        Writes metrics of a mode, by default the current one.

        The numbers of ranks are gathered here, in one call for all metrics, and stay on the device until [`read`], as
        the host would have to wait for them between the forward and the backward pass. All ranks must pass the same
        names.
        """
        numbers = [metric.numbers.float() for metric in metrics.values() if not metric.is_of_all_ranks]
        # Numbers of the host go to the device of the others
        device = next((values.device for values in numbers if values.device.type != "cpu"), None)
        gathered = self._gather(torch.cat([values.to(device) for values in numbers])[None]) if numbers else None
        self._pending.append((mode or self.mode, dict(metrics), gathered))

    def read(self) -> None:
        """Reads the numbers of ranks from the device, and joins them with earlier ones."""
        pending = self._pending
        self._pending = []
        of_ranks = [gathered for _, _, gathered in pending if gathered is not None]
        widths = [gathered.size(1) for gathered in of_ranks]
        on_host = iter(torch.cat(of_ranks, dim=1).cpu().double().split(widths, dim=1) if of_ranks else ())
        for mode, metrics, gathered in pending:
            columns = [len(metric.numbers) for metric in metrics.values() if not metric.is_of_all_ranks]
            local_rows = iter(() if gathered is None else next(on_host).split(columns, dim=1))
            for name, metric in metrics.items():
                rows = metric.numbers.cpu().double()[None] if metric.is_of_all_ranks else next(local_rows)
                earlier = self._joined[mode].get(name)
                # A checkpoint of an earlier version has other kinds
                if earlier is not None and earlier.kind == metric.kind:
                    rows = torch.cat([earlier.numbers[None], rows])
                self._joined[mode][name] = replace(metric, numbers=KINDS[metric.kind].join(rows))

    def pop(self, mode: Literal["train", "eval"]) -> dict[str, float]:
        """Returns the values of a mode's metrics since the last call."""
        self.read()
        metrics = self._joined[mode]
        self._joined[mode] = {}
        values = {name: metric.value.item() for name, metric in metrics.items()}
        return {name: value for name, value in values.items() if not (metrics[name].skips_nan and math.isnan(value))}

    def has(self, name: str) -> bool:
        """Returns whether a metric of the current mode was written since the last [`pop`]."""
        self.read()
        return name in self._joined[self.mode]

    def state_dict(self) -> dict[str, Any]:
        """Returns the training's metrics since the last log."""
        self.read()
        return {
            name: (metric.numbers, metric.kind, metric.skips_nan) for name, metric in self._joined["train"].items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores metrics of a checkpoint. Those of an earlier version are lists of numbers."""
        self._pending = []  # of a step that failed before, in the same process
        self._joined["train"] = {}
        for name, saved in state.items():
            if isinstance(saved, list):
                saved = _stacked(sum(saved), len(saved)), "mean", False
            numbers, kind, skips_nan = saved
            self._joined["train"][name] = Metric(numbers, kind, skips_nan=skips_nan)


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


def _stacked(*numbers: torch.Tensor | float) -> torch.Tensor:
    """Returns numbers `(K,)` on the device of the first tensor among them."""
    device = next((number.device for number in numbers if isinstance(number, torch.Tensor)), None)
    dtype = torch.double if device is None else torch.float  # not all devices have float64
    return torch.stack([torch.as_tensor(number, dtype=dtype, device=device).detach() for number in numbers])


def _nanmax(values: torch.Tensor) -> torch.Tensor:
    """Returns the largest value that isn't NaN, `(1,)`, minus infinity if there is none."""
    # TRL's functions would make the host wait for the device
    values = torch.where(values.isnan(), -torch.inf, values).flatten()
    return torch.cat([values, values.new_tensor([-torch.inf])]).amax(0, keepdim=True)
