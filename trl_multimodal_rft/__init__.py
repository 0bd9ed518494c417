# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reinforcement fine-tuning for models that see and hear, on TRL."""

from typing import TYPE_CHECKING

from .lazy import lazy_names
from .printable import make_records_printable as _make_records_printable


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .evaluation import GenerationEvalCallback
    from .extras.curves import TrainingCurvesCallback
    from .lightrft import ActorAL, ActorOmni, ActorVL, PPOTrainerAL, PPOTrainerVL, ReplayBuffer
    from .reporting.console import CompactLogCallback
    from .trainers.distillation.config import MultimodalDistillationConfig
    from .trainers.distillation.trainer import MultimodalDistillationTrainer
    from .trainers.grpo.config import MultimodalGRPOConfig
    from .trainers.grpo.trainer import MultimodalGRPOTrainer
    from .trainers.ppo.config import MultimodalPPOConfig
    from .trainers.ppo.trainer import MultimodalPPOTrainer
    from .trainers.preference.dpo_config import MultimodalDPOConfig
    from .trainers.preference.dpo_trainer import MultimodalDPOTrainer
    from .trainers.preference.kto_config import MultimodalKTOConfig
    from .trainers.preference.kto_trainer import MultimodalKTOTrainer
    from .trainers.preference.reward_config import MultimodalRewardConfig
    from .trainers.preference.reward_trainer import MultimodalRewardTrainer
    from .trainers.rloo.config import MultimodalRLOOConfig
    from .trainers.rloo.trainer import MultimodalRLOOTrainer
    from .trainers.supervised.config import MultimodalSFTConfig
    from .trainers.supervised.trainer import MultimodalSFTTrainer

__version__ = "0.1.0"

_make_records_printable()

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".evaluation": ["GenerationEvalCallback"],
        ".lightrft": ["ActorAL", "ActorOmni", "ActorVL", "PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"],
        ".reporting.console": ["CompactLogCallback"],
        ".extras.curves": ["TrainingCurvesCallback"],
        ".trainers.distillation.config": ["MultimodalDistillationConfig"],
        ".trainers.distillation.trainer": ["MultimodalDistillationTrainer"],
        ".trainers.grpo.config": ["MultimodalGRPOConfig"],
        ".trainers.grpo.trainer": ["MultimodalGRPOTrainer"],
        ".trainers.ppo.config": ["MultimodalPPOConfig"],
        ".trainers.ppo.trainer": ["MultimodalPPOTrainer"],
        ".trainers.preference.dpo_config": ["MultimodalDPOConfig"],
        ".trainers.preference.dpo_trainer": ["MultimodalDPOTrainer"],
        ".trainers.preference.kto_config": ["MultimodalKTOConfig"],
        ".trainers.preference.kto_trainer": ["MultimodalKTOTrainer"],
        ".trainers.preference.reward_config": ["MultimodalRewardConfig"],
        ".trainers.preference.reward_trainer": ["MultimodalRewardTrainer"],
        ".trainers.rloo.config": ["MultimodalRLOOConfig"],
        ".trainers.rloo.trainer": ["MultimodalRLOOTrainer"],
        ".trainers.supervised.config": ["MultimodalSFTConfig"],
        ".trainers.supervised.trainer": ["MultimodalSFTTrainer"],
    },
)
