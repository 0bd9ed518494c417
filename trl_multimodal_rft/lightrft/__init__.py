# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's classes and functions under LightRFT's module paths. The package exports them, but doesn't use them."""

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .models import Actor, ActorAL, ActorOmni, ActorVL, Critic
    from .trainer import PPOTrainerAL, PPOTrainerVL, ReplayBuffer

# Names by modules of LightRFT that have no file here. `lightrft.datasets`, `lightrft.models` and
# `lightrft.trainer` define the names: for
# example, `lightrft.models.actor_vl.ActorVL` is `lightrft.models.ActorVL`.
ALIASES = {
    "datasets.prompts_dataset_vl": ["PromptDatasetVL"],
    "datasets.sft_dataset_vl": ["SFTDatasetVL"],
    "models.actor_al": ["ActorAL", "ActorOmni"],
    "models.actor_language": ["ActorLanguage"],
    "models.actor_vl": ["ActorVL"],
    "models.critic_vl": ["CriticVL"],
    "trainer.advantage_calculator": ["normalize_advantages_cross_batch"],
    "trainer.experience_maker_vl": ["ExperienceVL", "NaiveExperienceMakerVL", "SamplesVL"],
    "trainer.fast_exp_maker": ["FastExperienceMaker"],
    "trainer.kl_controller": ["AdaptiveKLController", "FixedKLController"],
    "trainer.replay_buffer_vl": ["NaiveReplayBufferVL"],
    "trainer.spmd_ppo_trainer": ["SPMDPPOTrainerVL"],
}

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".models": ["Actor", "ActorAL", "ActorOmni", "ActorVL", "Critic"],
        ".trainer": ["PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"],
    },
)


def _load_name(package: str, names: list[str], name: str) -> type:
    if name not in names:
        raise AttributeError(name)
    return getattr(importlib.import_module(package, __name__), name)


for _path, _names in ALIASES.items():
    _module = types.ModuleType(f"{__name__}.{_path}", f"Another path of {', '.join(_names)}.")
    # `.datasets`, `.models` or `.trainer`, which defines the names
    vars(_module)["__getattr__"] = functools.partial(_load_name, f".{_path.split('.')[0]}", _names)
    vars(_module)["__dir__"] = functools.partial(list, _names)
    sys.modules[_module.__name__] = _module
