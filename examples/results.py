# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the example scripts write beside the model: held-out accuracy, before, during and after the training."""

import json
import math
from pathlib import Path
from statistics import fmean

from datasets import Dataset

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.evaluation import EvaluationConfig, GenerationEvalCallback, evaluate_trainer
from trl_multimodal_rft.rewards import accuracy_reward


def greedy_accuracy(trainer: MultimodalGRPOTrainer, dataset: Dataset, batch_size: int = 100) -> float:
    """
    Share of rows that the trainer's model answers correctly with greedy decoding.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer whose model and processor answer.
        dataset ([`~datasets.Dataset`]):
            Rows with the columns `prompt` and `solution` and their media.
        batch_size (`int`, *optional*, defaults to `100`):
            Rows answered at once on each process.

    Returns:
        `float`: Accuracy between 0 and 1.
    """
    return evaluate_trainer(trainer, dataset, accuracy_reward, _greedy(trainer, batch_size)).metrics["accuracy"]


def _greedy(trainer: MultimodalGRPOTrainer, batch_size: int = 100) -> EvaluationConfig:
    return EvaluationConfig(max_completion_length=trainer.max_completion_length, batch_size=batch_size)


class HeldOutAccuracy(GenerationEvalCallback):
    """
    Logs the accuracy on held-out rows after each quarter of the training, and what it was before.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer to which the callback will be attached.
        dataset ([`~datasets.Dataset`]):
            Rows with the columns `prompt` and `solution` and their media.
        before (`float`):
            Accuracy before the training.
    """

    def __init__(self, trainer: MultimodalGRPOTrainer, dataset: Dataset, before: float):
        super().__init__(trainer, dataset, accuracy_reward, _greedy(trainer), freq=1)
        self.before = before

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.freq = math.ceil(state.max_steps / 4)
        if state.global_step == 0:
            self.trainer.log({"eval_accuracy": self.before})

    @property
    def accuracy(self) -> float:
        """The latest accuracy."""
        return self.result.metrics["accuracy"]


def write_results(trainer: MultimodalGRPOTrainer, before: float, after: float) -> dict[str, float]:
    """
    Writes `demo_metrics.json` into the output folder.

    Of a trainer with a critic, `explained_variance` is among the metrics: the mean of the trainer's metric of that
    name, values at sampling time against returns, over the last quarter of the logged steps; `None` where all returns
    were equal.

    Args:
        trainer ([`MultimodalGRPOTrainer`]):
            Trainer that has trained.
        before (`float`):
            Held-out accuracy before the training.
        after (`float`):
            Held-out accuracy after the training.

    Returns:
        `dict[str, float]`: The metrics written.
    """
    history = trainer.state.log_history
    metrics = {
        "accuracy_before": before,
        "accuracy_after": after,
        "train_seconds": next(logs["train_runtime"] for logs in reversed(history) if "train_runtime" in logs),
        "updates": trainer.state.global_step,
    }
    explained = [logs["explained_variance"] for logs in history if "explained_variance" in logs]
    if explained:
        known = [value for value in explained[-math.ceil(len(explained) / 4) :] if value is not None]
        metrics["explained_variance"] = fmean(known) if known else None
    Path(trainer.args.output_dir, "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    return metrics
