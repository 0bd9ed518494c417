# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""RLOO on the rows of a dataset, see `trl-multimodal-rft rloo --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.rloo_config import MultimodalRLOOConfig
from ..trainers.rloo_trainer import MultimodalRLOOTrainer
from .arguments import RLScriptArguments
from .training import run


ARGUMENTS = (RLScriptArguments, MultimodalRLOOConfig, ModelConfig)
main = partial(run, "rloo", MultimodalRLOOTrainer)
