# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of LightRFT on this package's core. Nothing outside this folder imports it."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .actor import Actor
    from .actor_al import ActorAL
    from .actor_omni import ActorOmni
    from .actor_vl import ActorVL
    from .critic import Critic
    from .ppo_trainer_al import PPOTrainerAL
    from .ppo_trainer_vl import PPOTrainerVL
    from .replay_buffer import ReplayBuffer

# Imported when they are asked for
_LAZY = {
    "Actor": "actor",
    "ActorAL": "actor_al",
    "ActorOmni": "actor_omni",
    "ActorVL": "actor_vl",
    "Critic": "critic",
    "PPOTrainerAL": "ppo_trainer_al",
    "PPOTrainerVL": "ppo_trainer_vl",
    "ReplayBuffer": "replay_buffer",
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
