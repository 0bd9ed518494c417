# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""RLOO on the rows of a dataset, see `trl-multimodal-rft rloo --help`."""

from trl import ModelConfig

from ..trainers.rloo_config import MultimodalRLOOConfig
from ..trainers.rloo_trainer import MultimodalRLOOTrainer
from .arguments import RFTScriptArguments, parse
from .inputs import trainer_inputs
from .training import curves, finish, train


ARGUMENTS = (RFTScriptArguments, MultimodalRLOOConfig, ModelConfig)


def main(script_args: RFTScriptArguments, training_args: MultimodalRLOOConfig, model_args: ModelConfig) -> None:
    """
    Trains and saves a model.

    Args:
        script_args ([`RFTScriptArguments`]):
            Dataset, prompts and rewards.
        training_args ([`MultimodalRLOOConfig`]):
            The trainer's config.
        model_args ([`~trl.ModelConfig`]):
            The model.
    """
    trainer = MultimodalRLOOTrainer(**trainer_inputs(script_args, training_args, model_args), callbacks=curves())
    train(trainer, script_args)
    finish(trainer, script_args)


if __name__ == "__main__":
    main(*parse(ARGUMENTS))
