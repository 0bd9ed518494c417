# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What scripts do with a trainer."""

from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from transformers.utils import is_matplotlib_available
from trl import ScriptArguments

from ..reporting.curves import TrainingCurvesCallback


logger = get_logger(__name__)


def curves() -> list[TrainerCallback]:
    """
    Curves of a run, where there is something to draw them with.

    Returns:
        `list[TrainerCallback]`: A [`TrainingCurvesCallback`], or a warning and nothing.
    """
    if is_matplotlib_available():
        return [TrainingCurvesCallback()]
    logger.warning('No curves are drawn; `pip install "trl-multimodal-rft[plots]"`.')
    return []


def train(trainer: Any, script_args: ScriptArguments) -> None:
    """
    Trains, or goes on if the config says so, and saves the model and its card.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer.
        script_args ([`~trl.ScriptArguments`]):
            Names the dataset, for the card.
    """
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)
    trainer.create_model_card(dataset_name=script_args.dataset_name)


def finish(trainer: Any, script_args: ScriptArguments) -> None:
    """
    Pushes to the Hub if the config says so, and ends trackers and processes.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer.
        script_args ([`~trl.ScriptArguments`]):
            Names the dataset, for the card.
    """
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()
