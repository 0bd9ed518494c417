# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""GRPO on the rows of a dataset, see `trl-multimodal-rft grpo --help`."""

from trl import ModelConfig

from ..trainers.grpo_config import MultimodalGRPOConfig
from ..trainers.grpo_trainer import MultimodalGRPOTrainer
from .arguments import RLScriptArguments
from .training import run


ARGUMENTS = (RLScriptArguments, MultimodalGRPOConfig, ModelConfig)


def main(script_args: RLScriptArguments, training_args: MultimodalGRPOConfig, model_args: ModelConfig) -> None:
    """Trains and saves a model."""
    run("grpo", MultimodalGRPOTrainer, script_args, training_args, model_args)
