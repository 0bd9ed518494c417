# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What demos of pretrained models share: a cold start by SFT, GRPO, and a measurement before and after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import DatasetDict
from demo import cold_start, saved, train
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOConfig, ModelConfig

from trl_multimodal_rft import MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.cli.arguments import RunArguments
from trl_multimodal_rft.cli.inputs import adapter_inputs


@dataclass(frozen=True)
class Task:
    """
    Questions that a pretrained model learns to answer.

    Args:
        splits (`DatasetDict`):
            Rows of the splits `train` and `test`, of which the second one is measured.
        medium (`str`):
            Column with the media.
        cold_starts (`Sequence[tuple[str, dict]]`):
            Parts of the cold start: each the column with its completions, and its options, such as the modules that it
            leaves frozen.
    """

    splits: DatasetDict
    medium: str
    cold_starts: Sequence[tuple[str, dict[str, object]]]


def learn(
    task: Task,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    measure: Callable[[str, PreTrainedModel], dict[str, float]],
    script_args: RunArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
) -> tuple[MultimodalGRPOTrainer, dict[str, dict[str, float]]]:
    """
    Trains a model on a task, and returns GRPO's trainer and the metrics by stage.

    `measure` gets the name of a stage and the model at this stage. With `--dry_run`, nothing is measured.
    """
    metrics = {}

    def measured(stage: str, policy: PreTrainedModel) -> None:
        if not script_args.dry_run:
            metrics[stage] = measure(stage, policy)

    measured("before training", model)
    for column, options in task.cold_starts:
        model.requires_grad_(True)  # what an earlier part has frozen
        demonstrations = task.splits["train"].select_columns(["prompt", task.medium, column])
        demonstrations = demonstrations.rename_column(column, "completion")
        cold_start(model, processor, demonstrations, training_args, **options)
    measured("after the cold start", model)
    trainer = MultimodalGRPOTrainer(
        model=saved(model, processor, Path(training_args.output_dir) / "before"),
        reward_funcs=script_args.load_rewards(["accuracy_reward"]),
        args=training_args,
        train_dataset=task.splits["train"],
        callbacks=[TrainingCurvesCallback()],
        **adapter_inputs(model_args),
    )
    train(trainer, script_args)
    measured("after GRPO", trainer.model)
    return trainer, metrics
