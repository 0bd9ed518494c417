# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO on the rows of a dataset, see `trl-multimodal-rft ppo --help`."""

from typing import Any

from trl import ModelConfig

from ..data.named import load_rows
from ..trainers.ppo_config import MultimodalPPOConfig
from ..trainers.ppo_trainer import MultimodalPPOTrainer
from .arguments import PPOScriptArguments, parse
from .inputs import trainer_inputs
from .training import curves, finish, train


ARGUMENTS = (PPOScriptArguments, MultimodalPPOConfig, ModelConfig)


def main(script_args: PPOScriptArguments, training_args: MultimodalPPOConfig, model_args: ModelConfig) -> None:
    """
    Trains and saves a model.

    Args:
        script_args ([`PPOScriptArguments`]):
            Dataset, prompts, rewards, critic and supervised rows.
        training_args ([`MultimodalPPOConfig`]):
            The trainer's config.
        model_args ([`~trl.ModelConfig`]):
            The model.
    """
    trainer = MultimodalPPOTrainer(
        **trainer_inputs(script_args, training_args, model_args), **critic_inputs(script_args), callbacks=curves()
    )
    train(trainer, script_args)
    finish(trainer, script_args)


def critic_inputs(script_args: PPOScriptArguments) -> dict[str, Any]:
    """
    Arguments of the trainer that only PPO has.

    Args:
        script_args ([`PPOScriptArguments`]):
            Which critic and which supervised rows.

    Returns:
        `dict[str, Any]`: Arguments by their names.

    Raises:
        `ValueError`: If there is no such dataset.
    """
    name, config, split = script_args.ptx_dataset_name, script_args.ptx_dataset_config, script_args.ptx_dataset_split
    return {
        "value_model": script_args.value_model_name_or_path,
        "ptx_dataset": None if name is None else load_rows(name, config, split, streaming=False),
    }


if __name__ == "__main__":
    main(*parse(ARGUMENTS))
