# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of LightRFT on this package's core. Nothing outside this folder imports it."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:
    from .actor import Actor
    from .actor_al import ActorAL
    from .actor_omni import ActorOmni
    from .actor_vl import ActorVL
    from .critic import Critic
    from .ppo_trainer_al import PPOTrainerAL
    from .ppo_trainer_vl import PPOTrainerVL
    from .replay_buffer import ReplayBuffer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Actor": "actor",
        "ActorAL": "actor_al",
        "ActorOmni": "actor_omni",
        "ActorVL": "actor_vl",
        "Critic": "critic",
        "PPOTrainerAL": "ppo_trainer_al",
        "PPOTrainerVL": "ppo_trainer_vl",
        "ReplayBuffer": "replay_buffer",
    },
)
