# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Callbacks that read the pending metrics of steps, and average those of evaluations."""

import math

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...algorithms.metrics import MetricLog
from ...reporting.events import EventPart
from ...rollout.ranks import sum_over_ranks


class EvaluationMeans(TrainerCallback):
    """
    Callback that keeps one value of each metric of an evaluation: the mean over the rows so far. TRL logs the mean of
    batches, in which a row of a smaller last batch would count more. Metrics that are merged already stay as they are.
    """

    def __init__(self, metrics: dict[str, list[float]], accelerator: Accelerator):
        self.metrics = metrics
        self.accelerator = accelerator
        self.n_rows = 0  # rows, or completions, in this rank's last batch
        # Of all ranks' last batch, by metric: the number of values behind a mean, if it isn't that of the rows
        self.counts: dict[str, float] = {}
        self._totals: dict[str, float] = {}  # by metric, the number of rows, or values, of the batches so far

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart
    ):
        [n_rows] = sum_over_ranks(self.accelerator, [float(self.n_rows)])
        for name, values in self.metrics.items():
            earlier = self._totals.get(name, 0.0)
            count = self.counts.get(name, n_rows)
            new_values = [value for value in values[name in self._totals :] if not math.isnan(value)]
            if new_values and count:
                mean = sum(new_values) / len(new_values)
                self._totals[name] = earlier + count
                mean += (values[0] - mean) * earlier / (earlier + count) if earlier else 0.0
                self.metrics[name] = [mean]
        self.counts = {}

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._totals = {}


def is_due(interval: int, step: int, n_steps: int) -> bool:
    """
    Returns whether a multiple of `interval` is among the numbers of the `n_steps` updates after update `step`. With an
    interval of 10 and 4 updates, step 8 is due, since update 10 is among the updates 9 to 12.
    """
    return (step + n_steps) // interval > step // interval


class ReadMetrics(TrainerCallback):
    """Callback that reads pending metrics after an optimizer or evaluation step, before other callbacks log them."""

    def __init__(self, metrics: MetricLog):
        self.metrics = metrics

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self.metrics.read()

    on_prediction_step = on_step_end
