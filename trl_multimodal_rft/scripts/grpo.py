# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""GRPO on the rows of a dataset, see `trl-multimodal-rft grpo --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.grpo_config import MultimodalGRPOConfig
from ..trainers.grpo_trainer import MultimodalGRPOTrainer
from .arguments import RLScriptArguments
from .training import run


ARGUMENTS = (RLScriptArguments, MultimodalGRPOConfig, ModelConfig)
main = partial(run, "grpo", MultimodalGRPOTrainer)
