# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of a trainer: when they are read, and how they get into logs."""

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...algorithms.metrics import MetricLog, weighted_mean
from ...reporting.events import EventPart
from .best_metric import check_best_metric, evaluation_metrics, makes_other_metrics


if TYPE_CHECKING:
    from trl import GRPOTrainer as Trainer
else:
    Trainer = object


def is_due(interval: int, step: int, n_steps: int) -> bool:
    """
    Returns whether a multiple of `interval` is among the numbers of the `n_steps` updates after update `step`. With an
    interval of 10 and 4 updates, step 8 is due, since update 10 is among the updates 9 to 12.
    """
    return (step + n_steps) // interval > step // interval


class ReadMetrics(TrainerCallback):
    """Callback that reads pending metrics after an optimizer or evaluation step, so that few are pending."""

    def __init__(self, metrics: MetricLog):
        self.metrics = metrics

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self.metrics.read()

    on_prediction_step = on_step_end


class LoggedTrainer(Trainer):
    """
    A trainer of TRL whose metrics are sums and counts in a [`~algorithms.metrics.MetricLog`], so that they don't
    depend on the size of batches. Metrics of an evaluation have the name of its dataset.
    """

    accelerator: Any
    model: Any
    _metrics: Any  # TRL's lists of values, which `log` fills just before TRL reads them
    # Number of rows or tokens over which the last loss is a mean; `None` if a subclass computes it by itself
    _loss_weight: torch.Tensor | float | None = None

    @cached_property
    def _metric_log(self) -> MetricLog:
        return MetricLog(lambda: self.model.training, self.accelerator.gather)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        Logs `logs` with the metrics of the current mode since the last log.

        Args:
            logs (`dict[str, float]`):
                Values to log.
            start_time (`float`, *optional*):
                Start of the training.
        """
        mode = self._metric_log.mode
        for name, value in self._metric_log.pop(mode).items():
            if not self._metrics[mode].get(name):  # a subclass may have its own
                self._metrics[mode][name] = [value]  # TRL logs the mean of this list
        # NaN is `None` in logs of evaluations, as in TRL's GRPO, but for a loss. Evaluations return it
        written: Any = logs
        nan = []
        for name, value in logs.items():
            is_metric = mode == "eval" and isinstance(value, float) and not name.endswith("_loss")
            if is_metric and math.isnan(value):
                nan.append(name)
        written.update(dict.fromkeys(nan))
        try:
            super().log(logs, start_time)
        finally:
            self._metrics[mode].clear()  # also if the log can't be written
        written.update(dict.fromkeys(nan, math.nan))

    def prediction_step(self, *args, **kwargs):
        outputs = super().prediction_step(*args, **kwargs)
        if outputs[0] is not None and self._loss_weight is not None:
            self._metric_log.add({"loss": weighted_mean(outputs[0], self._loss_weight)}, mode="eval")
        return outputs

    def _check_best_metric(self) -> None:
        """Raises a `ValueError` if no evaluation makes the metric that chooses the best model."""
        metric = self.args.metric_for_best_model
        dataset: Any = self.eval_dataset
        if metric is None or self.args.eval_strategy == "no" or dataset is None:
            return
        functions = getattr(self, "reward_funcs", None) or ()
        callbacks = self.callback_handler.callbacks
        if not makes_other_metrics(type(self), callbacks, functions, self.compute_metrics):
            names = evaluation_metrics(self._tag_names[1], self.reward_func_names)
            check_best_metric(metric, names, [*dataset] if isinstance(dataset, dict) else [])

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        """
        Evaluates as [`~transformers.Trainer.evaluation_loop`]. The output also has the trainer's metrics, and the loss
        is a mean over what the loss in training is a mean over. Names of metrics begin with `metric_key_prefix`.
        """
        kwargs["metric_key_prefix"] = metric_key_prefix
        try:
            output: Any = super().evaluation_loop(dataloader, description, *args, **kwargs)
        finally:
            values = self._metric_log.pop("eval")  # also of an evaluation that an error ends
            added = {name: list(numbers) for name, numbers in self._metrics["eval"].items()}  # by a subclass
            self._metrics["eval"].clear()
        for name, numbers in added.items():
            valid = [number for number in numbers if not math.isnan(number)]
            values[name] = sum(valid) / len(valid) if valid else math.nan
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in values.items()})
        return output
