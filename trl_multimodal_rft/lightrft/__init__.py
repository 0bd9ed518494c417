# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of LightRFT on this package's core. Nothing outside this folder imports it."""

from .actor import Actor
from .actor_al import ActorAL
from .actor_omni import ActorOmni
from .actor_vl import ActorVL
from .critic import Critic
from .ppo_trainer_al import PPOTrainerAL
from .ppo_trainer_vl import PPOTrainerVL
from .replay_buffer import ReplayBuffer
