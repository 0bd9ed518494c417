# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of LightRFT, with its module paths, on this package's core. Nothing outside this folder imports it."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:
    from .models import Actor, ActorAL, ActorOmni, ActorVL, Critic
    from .trainer import PPOTrainerAL, PPOTrainerVL, ReplayBuffer

__getattr__, __dir__, __all__ = lazy_names(__name__)
