# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""GRPO on the rows of a dataset, see `trl-multimodal-rft grpo --help`."""

from trl import ModelConfig

from ..trainers.grpo_config import MultimodalGRPOConfig
from ..trainers.grpo_trainer import MultimodalGRPOTrainer
from .arguments import RFTScriptArguments, parse
from .inputs import trainer_inputs
from .training import curves, finish, train


ARGUMENTS = (RFTScriptArguments, MultimodalGRPOConfig, ModelConfig)


def main(script_args: RFTScriptArguments, training_args: MultimodalGRPOConfig, model_args: ModelConfig) -> None:
    """
    Trains and saves a model.

    Args:
        script_args ([`RFTScriptArguments`]):
            Dataset, prompts and rewards.
        training_args ([`MultimodalGRPOConfig`]):
            The trainer's config.
        model_args ([`~trl.ModelConfig`]):
            The model.
    """
    trainer = MultimodalGRPOTrainer(**trainer_inputs(script_args, training_args, model_args), callbacks=curves())
    train(trainer, script_args)
    finish(trainer, script_args)


if __name__ == "__main__":
    main(*parse(ARGUMENTS))
