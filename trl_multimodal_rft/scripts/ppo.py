# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO on the rows of a dataset, see `trl-multimodal-rft ppo --help`."""

from typing import Any

from trl import ModelConfig

from ..data.rows.load import load_rows
from ..trainers.ppo_config import MultimodalPPOConfig
from ..trainers.ppo_trainer import MultimodalPPOTrainer
from .arguments import PPOScriptArguments
from .training import run


ARGUMENTS = (PPOScriptArguments, MultimodalPPOConfig, ModelConfig)


def main(script_args: PPOScriptArguments, training_args: MultimodalPPOConfig, model_args: ModelConfig) -> None:
    """Trains and saves a model."""
    run("ppo", MultimodalPPOTrainer, script_args, training_args, model_args, **critic_inputs(script_args))


def critic_inputs(script_args: PPOScriptArguments) -> dict[str, Any]:
    """Arguments of the trainer that only PPO has."""
    name, config, split = script_args.ptx_dataset_name, script_args.ptx_dataset_config, script_args.ptx_dataset_split
    return {
        "value_model": script_args.value_model_name_or_path,
        "ptx_dataset": None if name is None else load_rows(name, config, split, streaming=False),
    }
