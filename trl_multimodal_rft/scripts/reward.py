# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training of a reward model on the rows of a dataset, see `trl-multimodal-rft reward --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.reward_config import MultimodalRewardConfig
from ..trainers.reward_trainer import MultimodalRewardTrainer
from .arguments import RunArguments
from .training import run


ARGUMENTS = (RunArguments, MultimodalRewardConfig, ModelConfig)
main = partial(run, "reward", MultimodalRewardTrainer)
