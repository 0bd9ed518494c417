# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Actors: a policy with the interface of the reference system, on the same forward as the trainers."""

from .actor import Actor
from .actor_al import ActorAL
from .actor_omni import ActorOmni
from .actor_vl import ActorVL
from .critic import Critic, ValueHead
