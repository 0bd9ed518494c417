# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Experience, buffers and PPO trainers: the names of `lightrft.trainer`."""

from typing import TYPE_CHECKING

from ...lazy import lazy_names


if TYPE_CHECKING:
    from .experience import Experience, ExperienceVL
    from .experience_config import ExperienceConfig
    from .experience_maker import NaiveExperienceMaker
    from .experience_maker_vl import NaiveExperienceMakerVL
    from .kl_controller import AdaptiveKLController, FixedKLController
    from .ppo_trainer_vl import PPOTrainerAL, PPOTrainerVL
    from .replay_buffer import NaiveReplayBuffer, ReplayBuffer
    from .replay_buffer_vl import NaiveReplayBufferVL
    from .spmd_ppo_trainer import SPMDPPOTrainerVL

__getattr__, __dir__, __all__ = lazy_names(__name__)
