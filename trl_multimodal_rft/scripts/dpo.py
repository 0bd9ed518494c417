# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preference optimization on the rows of a dataset, see `trl-multimodal-rft dpo --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.dpo_config import MultimodalDPOConfig
from ..trainers.dpo_trainer import MultimodalDPOTrainer
from .arguments import RunArguments
from .training import run


ARGUMENTS = (RunArguments, MultimodalDPOConfig, ModelConfig)
main = partial(run, "dpo", MultimodalDPOTrainer)
