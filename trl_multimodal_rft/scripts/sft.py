# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supervised training on the rows of a dataset, see `trl-multimodal-rft sft --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.sft_config import MultimodalSFTConfig
from ..trainers.sft_trainer import MultimodalSFTTrainer
from .arguments import SFTScriptArguments
from .training import run


ARGUMENTS = (SFTScriptArguments, MultimodalSFTConfig, ModelConfig)
main = partial(run, "sft", MultimodalSFTTrainer)
