# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""On-policy distillation on the rows of a dataset, see `trl-multimodal-rft distillation --help`."""

from functools import partial

from trl import ModelConfig

from ..trainers.distillation_config import MultimodalDistillationConfig
from ..trainers.distillation_trainer import MultimodalDistillationTrainer
from .arguments import DistillationScriptArguments
from .training import run


ARGUMENTS = (DistillationScriptArguments, MultimodalDistillationConfig, ModelConfig)
main = partial(run, "distillation", MultimodalDistillationTrainer)
