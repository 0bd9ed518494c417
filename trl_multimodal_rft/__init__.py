# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reinforcement fine-tuning for models that see and hear, on TRL."""

from typing import TYPE_CHECKING

from .lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .evaluation import GenerationEvalCallback
    from .extras.curves import TrainingCurvesCallback
    from .lightrft import ActorAL, ActorOmni, ActorVL, PPOTrainerAL, PPOTrainerVL, ReplayBuffer
    from .reporting.console import CompactLogCallback
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

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".evaluation": ["GenerationEvalCallback"],
        ".lightrft": ["ActorAL", "ActorOmni", "ActorVL", "PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"],
        ".reporting.console": ["CompactLogCallback"],
        ".extras.curves": ["TrainingCurvesCallback"],
        ".trainers.distillation_config": ["MultimodalDistillationConfig"],
        ".trainers.distillation_trainer": ["MultimodalDistillationTrainer"],
        ".trainers.dpo_config": ["MultimodalDPOConfig"],
        ".trainers.dpo_trainer": ["MultimodalDPOTrainer"],
        ".trainers.grpo_config": ["MultimodalGRPOConfig"],
        ".trainers.grpo_trainer": ["MultimodalGRPOTrainer"],
        ".trainers.kto_config": ["MultimodalKTOConfig"],
        ".trainers.kto_trainer": ["MultimodalKTOTrainer"],
        ".trainers.ppo_config": ["MultimodalPPOConfig"],
        ".trainers.ppo_trainer": ["MultimodalPPOTrainer"],
        ".trainers.reward_config": ["MultimodalRewardConfig"],
        ".trainers.reward_trainer": ["MultimodalRewardTrainer"],
        ".trainers.rloo_config": ["MultimodalRLOOConfig"],
        ".trainers.rloo_trainer": ["MultimodalRLOOTrainer"],
        ".trainers.sft_config": ["MultimodalSFTConfig"],
        ".trainers.sft_trainer": ["MultimodalSFTTrainer"],
    },
)
