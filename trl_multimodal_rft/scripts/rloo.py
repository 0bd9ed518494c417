# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""RLOO on the rows of a dataset, see `trl-multimodal-rft rloo --help`."""

from trl import ModelConfig

from ..trainers.rloo_config import MultimodalRLOOConfig
from ..trainers.rloo_trainer import MultimodalRLOOTrainer
from .arguments import RLScriptArguments
from .training import run


ARGUMENTS = (RLScriptArguments, MultimodalRLOOConfig, ModelConfig)


def main(script_args: RLScriptArguments, training_args: MultimodalRLOOConfig, model_args: ModelConfig) -> None:
    """Trains and saves a model."""
    run("rloo", MultimodalRLOOTrainer, script_args, training_args, model_args)
