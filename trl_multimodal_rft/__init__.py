# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reinforcement fine-tuning for models that see and hear, on TRL."""

from typing import TYPE_CHECKING

from .lazy import lazy_names


if TYPE_CHECKING:  # names that `lazy_names` imports when they are first used
    from .evaluation import GenerationEvalCallback
    from .lightrft import ActorAL, ActorOmni, ActorVL, PPOTrainerAL, PPOTrainerVL, ReplayBuffer
    from .reporting.console import CompactLogCallback
    from .reporting.curves import TrainingCurvesCallback
    from .trainers.distillation_config import MultimodalDistillationConfig
    from .trainers.distillation_trainer import MultimodalDistillationTrainer
    from .trainers.dpo_config import MultimodalDPOConfig
    from .trainers.dpo_trainer import MultimodalDPOTrainer
    from .trainers.grpo_config import MultimodalGRPOConfig
    from .trainers.grpo_trainer import MultimodalGRPOTrainer
    from .trainers.kto_config import MultimodalKTOConfig
    from .trainers.kto_trainer import MultimodalKTOTrainer
    from .trainers.ppo_config import MultimodalPPOConfig
    from .trainers.ppo_trainer import MultimodalPPOTrainer
    from .trainers.reward_config import MultimodalRewardConfig
    from .trainers.reward_trainer import MultimodalRewardTrainer
    from .trainers.rloo_config import MultimodalRLOOConfig
    from .trainers.rloo_trainer import MultimodalRLOOTrainer
    from .trainers.sft_config import MultimodalSFTConfig
    from .trainers.sft_trainer import MultimodalSFTTrainer

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
