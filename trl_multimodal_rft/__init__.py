# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reinforcement fine-tuning for models that see and hear, on TRL."""

from .evaluation import GenerationEvalCallback
from .trainers import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
)
from .trainers.curves import TrainingCurvesCallback


__version__ = "0.1.0"
