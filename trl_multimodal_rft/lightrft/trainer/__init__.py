# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Experience, buffers and PPO trainers: the names of `lightrft.trainer`."""

from typing import TYPE_CHECKING

from ...lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from ...algorithms.kl import AdaptiveKLController, FixedKLController
    from .experience import Experience, ExperienceVL
    from .experience import Samples as SamplesVL
    from .experience_config import ExperienceConfig
    from .experience_maker import NaiveExperienceMaker
    from .experience_maker import NaiveExperienceMaker as FastExperienceMaker
    from .experience_maker import NaiveExperienceMaker as NaiveExperienceMakerVL
    from .ppo_trainer_vl import PPOTrainerAL, PPOTrainerVL
    from .ppo_trainer_vl import PPOTrainerVL as SPMDPPOTrainerVL
    from .replay_buffer import NaiveReplayBuffer, ReplayBuffer
    from .replay_buffer import NaiveReplayBuffer as NaiveReplayBufferVL
    from .rollout_advantages import normalize_advantages_cross_batch

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "...algorithms.kl": ["AdaptiveKLController", "FixedKLController"],
        ".experience": ["Experience", "ExperienceVL", "Samples as SamplesVL"],
        ".experience_config": ["ExperienceConfig"],
        ".experience_maker": [
            "NaiveExperienceMaker",
            "NaiveExperienceMaker as FastExperienceMaker",
            "NaiveExperienceMaker as NaiveExperienceMakerVL",
        ],
        ".ppo_trainer_vl": ["PPOTrainerAL", "PPOTrainerVL", "PPOTrainerVL as SPMDPPOTrainerVL"],
        ".replay_buffer": ["NaiveReplayBuffer", "ReplayBuffer", "NaiveReplayBuffer as NaiveReplayBufferVL"],
        ".rollout_advantages": ["normalize_advantages_cross_batch"],
    },
)
