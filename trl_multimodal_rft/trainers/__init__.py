# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainers and their configs."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .distillation_config import MultimodalDistillationConfig
    from .distillation_trainer import MultimodalDistillationTrainer
    from .dpo_config import MultimodalDPOConfig
    from .dpo_trainer import MultimodalDPOTrainer
    from .grpo_config import MultimodalGRPOConfig
    from .grpo_trainer import MultimodalGRPOTrainer
    from .kto_config import MultimodalKTOConfig
    from .kto_trainer import MultimodalKTOTrainer
    from .ppo_config import MultimodalPPOConfig
    from .ppo_trainer import MultimodalPPOTrainer
    from .reward_config import MultimodalRewardConfig
    from .reward_trainer import MultimodalRewardTrainer
    from .rloo_config import MultimodalRLOOConfig
    from .rloo_trainer import MultimodalRLOOTrainer
    from .sft_config import MultimodalSFTConfig
    from .sft_trainer import MultimodalSFTTrainer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".distillation_config": ["MultimodalDistillationConfig"],
        ".distillation_trainer": ["MultimodalDistillationTrainer"],
        ".dpo_config": ["MultimodalDPOConfig"],
        ".dpo_trainer": ["MultimodalDPOTrainer"],
        ".grpo_config": ["MultimodalGRPOConfig"],
        ".grpo_trainer": ["MultimodalGRPOTrainer"],
        ".kto_config": ["MultimodalKTOConfig"],
        ".kto_trainer": ["MultimodalKTOTrainer"],
        ".ppo_config": ["MultimodalPPOConfig"],
        ".ppo_trainer": ["MultimodalPPOTrainer"],
        ".reward_config": ["MultimodalRewardConfig"],
        ".reward_trainer": ["MultimodalRewardTrainer"],
        ".rloo_config": ["MultimodalRLOOConfig"],
        ".rloo_trainer": ["MultimodalRLOOTrainer"],
        ".sft_config": ["MultimodalSFTConfig"],
        ".sft_trainer": ["MultimodalSFTTrainer"],
    },
)
