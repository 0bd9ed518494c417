# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainers and their configs."""

from .grpo_config import MultimodalGRPOConfig
from .grpo_trainer import MultimodalGRPOTrainer
from .ppo_config import MultimodalPPOConfig
from .ppo_trainer import MultimodalPPOTrainer
from .rloo_config import MultimodalRLOOConfig
from .rloo_trainer import MultimodalRLOOTrainer
