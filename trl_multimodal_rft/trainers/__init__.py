# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainers and their configs."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .distillation.config import MultimodalDistillationConfig
    from .distillation.trainer import MultimodalDistillationTrainer
    from .grpo.config import MultimodalGRPOConfig
    from .grpo.trainer import MultimodalGRPOTrainer
    from .ppo.config import MultimodalPPOConfig
    from .ppo.trainer import MultimodalPPOTrainer
    from .preference.dpo_config import MultimodalDPOConfig
    from .preference.dpo_trainer import MultimodalDPOTrainer
    from .preference.kto_config import MultimodalKTOConfig
    from .preference.kto_trainer import MultimodalKTOTrainer
    from .preference.reward_config import MultimodalRewardConfig
    from .preference.reward_trainer import MultimodalRewardTrainer
    from .rloo.config import MultimodalRLOOConfig
    from .rloo.trainer import MultimodalRLOOTrainer
    from .supervised.config import MultimodalSFTConfig
    from .supervised.trainer import MultimodalSFTTrainer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".distillation.config": ["MultimodalDistillationConfig"],
        ".distillation.trainer": ["MultimodalDistillationTrainer"],
        ".grpo.config": ["MultimodalGRPOConfig"],
        ".grpo.trainer": ["MultimodalGRPOTrainer"],
        ".ppo.config": ["MultimodalPPOConfig"],
        ".ppo.trainer": ["MultimodalPPOTrainer"],
        ".preference.dpo_config": ["MultimodalDPOConfig"],
        ".preference.dpo_trainer": ["MultimodalDPOTrainer"],
        ".preference.kto_config": ["MultimodalKTOConfig"],
        ".preference.kto_trainer": ["MultimodalKTOTrainer"],
        ".preference.reward_config": ["MultimodalRewardConfig"],
        ".preference.reward_trainer": ["MultimodalRewardTrainer"],
        ".rloo.config": ["MultimodalRLOOConfig"],
        ".rloo.trainer": ["MultimodalRLOOTrainer"],
        ".supervised.config": ["MultimodalSFTConfig"],
        ".supervised.trainer": ["MultimodalSFTTrainer"],
    },
)
