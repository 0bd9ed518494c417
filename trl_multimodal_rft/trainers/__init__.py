# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
from .grpo_config import MultimodalGRPOConfig
from .grpo_trainer import MultimodalGRPOTrainer
