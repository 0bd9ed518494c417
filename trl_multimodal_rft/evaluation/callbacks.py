# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluation of completions during training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..reporting.events import EventPart
from ..trainers.sampling.trainer import MultimodalTrainer
from .config import EvaluationConfig
from .evaluator import check_has_sampler, evaluate_trainer, named_rewards
from .result import EvaluationResult


class GenerationEvalCallback(TrainerCallback):
    """
    A [`~transformers.TrainerCallback`] that samples completions of held-out prompts and logs their accuracy.

    The trainer's evaluation samples as in training, `num_generations` completions at the training temperature, and
    logs mean rewards. The callback decodes greedily by default, counts each row once, and logs `eval_accuracy`,
    `eval_accuracy_low`, `eval_accuracy_high`, `eval_pass@k` and the other metrics of [`EvaluationResult`]. When
    training ends, it always evaluates the last weights.

    Training with the callback makes the same updates as without it, also under DDP, FSDP2 and DeepSpeed.

    Args:
        trainer ([`MultimodalGRPOTrainer`], [`MultimodalRLOOTrainer`] or [`MultimodalPPOTrainer`]):
            Trainer to which the callback will be attached.
        eval_dataset ([`~datasets.Dataset`] or `Sequence[dict]`, *optional*):
            Rows with the prompts. By default the trainer's `eval_dataset`.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Reward functions, of which the first decides what is correct. By default the trainer's reward functions.
        args ([`EvaluationConfig`], *optional*):
            Options of sampling and counting, see [`evaluate_trainer`].
        freq (`int` or `"epoch"`, *optional*):
            Number of steps between evaluations, of which the first is before training, or `"epoch"`. By default the
            callback evaluates whenever the trainer does (`eval_strategy`), and `metric_for_best_model` and
            [`~transformers.EarlyStoppingCallback`] can use the callback's metrics. With `freq`, they can do so if
            `metric_for_best_model` names one of these metrics.
        output_dir (`str`, *optional*):
            Folder for the results, in folders `step-<number>`, see [`EvaluationResult.save`].

    Raises:
        `ValueError`: If there is no dataset, or if it fails the checks of a trainer's `eval_dataset`.

    Example:
    ```python
    trainer = MultimodalGRPOTrainer(...)
    trainer.add_callback(GenerationEvalCallback(trainer, eval_dataset, accuracy_reward, freq=50))
    trainer.train()
    ```
    """

    def __init__(
        self,
        trainer: MultimodalTrainer,
        eval_dataset: Dataset | Sequence[dict[str, Any]] | None = None,
        reward_funcs: Callable | list[Callable] | None = None,
        args: EvaluationConfig | None = None,
        freq: int | Literal["epoch"] | None = None,
        output_dir: str | None = None,
    ):
        check_has_sampler(trainer)
        if eval_dataset is None and not isinstance(trainer.eval_dataset, Dataset):
            raise ValueError("The callback has no dataset to evaluate on; pass it as `eval_dataset`.")
        if freq is not None and freq != "epoch" and not (isinstance(freq, int) and freq > 0):
            raise ValueError(f"`freq` is {freq!r}; set it to a number of steps, to 'epoch', or leave it out.")
        rewards = named_rewards(reward_funcs or list(trainer.reward_funcs))
        reads_otherwise = args is not None and (
            args.ignored_media_columns is not None or args.on_media_error == "skip"
        )
        if eval_dataset is not None and not reads_otherwise:
            trainer.check_eval_dataset(eval_dataset, rewards.functions)
        self.trainer = trainer
        self.eval_dataset = eval_dataset
        self.reward_funcs = reward_funcs
        self.args = args
        self.freq = freq
        self.output_dir = output_dir
        self.result: EvaluationResult | None = None  # the latest result
        self._metrics: dict[str, float] = {}  # metrics of `result`, by their names in logs
        self._last_step = -1

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: EventPart):
        self._last_step = -1
        # Early stopping reads the metrics, so it has to run after this callback. The handler iterates over its list,
        # which must not change, so a new list replaces it.
        handler = self.trainer.callback_handler
        early_stops = [callback for callback in handler.callbacks if isinstance(callback, EarlyStoppingCallback)]
        handler.callbacks = [callback for callback in handler.callbacks if callback not in early_stops] + early_stops
        if isinstance(self.freq, int) and state.global_step == 0:
            self._evaluate(state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if isinstance(self.freq, int) and state.global_step % self.freq == 0:
            self._evaluate(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if self.freq == "epoch" and state.global_step != self._last_step:
            self._evaluate(state, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: EventPart,
    ):
        # The callback may have evaluated in this step already, due to `freq` or to another of several eval datasets
        has_current_metrics = self.trainer.is_in_train and state.global_step == self._last_step
        if not has_current_metrics and (
            self.freq is None or self.trainer.is_in_train and self._can_add_best_metric(args, metrics)
        ):
            self._evaluate(state, control)
            has_current_metrics = True
        if has_current_metrics and metrics is not None:
            metrics.update(self._metrics)

    def _can_add_best_metric(self, args: TrainingArguments, metrics: dict[str, float] | None) -> bool:
        """
        Returns whether `metrics` lacks `metric_for_best_model`, and the callback's metrics can include it. Before the
        callback's first evaluation, the names of its metrics are unknown, so they can include any.
        """
        name = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        if args.metric_for_best_model is None or metrics is None or name in metrics:
            return False
        return self.result is None or name in self._metrics

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        # After the evaluation in the last step, the trainer may have loaded the best weights
        if state.global_step != self._last_step or args.load_best_model_at_end:
            self._evaluate(state, control)

    def _evaluate(self, state: TrainerState, control: TrainerControl) -> None:
        self.result = evaluate_trainer(self.trainer, self.eval_dataset, self.reward_funcs, self.args)
        self._last_step = state.global_step
        if self.output_dir is not None:
            self.result.save(Path(self.output_dir, f"step-{state.global_step}"))
        self._metrics = {f"eval_{name}": value for name, value in self.result.metrics.items() if value is not None}
        # `Trainer.log` resets `should_log`, but a log of training metrics may still be due in this step
        should_log = control.should_log
        # `Trainer.log`, not TRL's `log`, which would move the training metrics since its last call to this log
        log: Callable[..., None] = Trainer.log
        log(self.trainer, dict(self._metrics))
        control.should_log = should_log
