# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's classes and functions under its module paths. The rest of this package never imports this folder."""

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:
    from .models import Actor, ActorAL, ActorOmni, ActorVL, Critic
    from .trainer import PPOTrainerAL, PPOTrainerVL, ReplayBuffer

# Modules of LightRFT that have no file here. The packages `models` and `trainer` define their names.
ALIASES = {
    "models.actor_al": ["ActorAL", "ActorOmni"],
    "models.actor_language": ["ActorLanguage"],
    "models.actor_vl": ["ActorVL"],
    "trainer.advantage_calculator": ["normalize_advantages_cross_batch"],
    "trainer.experience_maker_vl": ["ExperienceVL", "NaiveExperienceMakerVL", "SamplesVL"],
    "trainer.fast_exp_maker": ["FastExperienceMaker"],
    "trainer.kl_controller": ["AdaptiveKLController", "FixedKLController"],
    "trainer.replay_buffer_vl": ["NaiveReplayBufferVL"],
    "trainer.spmd_ppo_trainer": ["SPMDPPOTrainerVL"],
}

__getattr__, __dir__, __all__ = lazy_names(__name__)


def _load_name(package: str, names: list[str], name: str) -> type:
    """Returns an attribute of an alias module, if it is among the names of the alias."""
    if name not in names:
        raise AttributeError(name)
    return getattr(importlib.import_module(package, __name__), name)


for _path, _names in ALIASES.items():
    _module = types.ModuleType(f"{__name__}.{_path}", f"Another path of {', '.join(_names)}.")
    vars(_module)["__getattr__"] = functools.partial(_load_name, f".{_path.split('.')[0]}", _names)
    vars(_module)["__dir__"] = functools.partial(list, _names)
    sys.modules[_module.__name__] = _module
