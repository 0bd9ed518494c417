# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reinforcement fine-tuning for models that see and hear, on TRL."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .evaluation import GenerationEvalCallback
    from .lightrft import ActorAL, ActorOmni, ActorVL, PPOTrainerAL, PPOTrainerVL, ReplayBuffer
    from .reporting.curves import TrainingCurvesCallback
    from .trainers import (
        MultimodalGRPOConfig,
        MultimodalGRPOTrainer,
        MultimodalPPOConfig,
        MultimodalPPOTrainer,
        MultimodalRLOOConfig,
        MultimodalRLOOTrainer,
    )


__version__ = "0.1.0"

# Imported when they are asked for: the command's `--help` needs none of them
_TRAINERS = [f"Multimodal{method}{part}" for method in ("GRPO", "PPO", "RLOO") for part in ("Config", "Trainer")]
_LAZY = {
    **dict.fromkeys(_TRAINERS, "trainers"),
    "GenerationEvalCallback": "evaluation",
    "TrainingCurvesCallback": "reporting.curves",
    **dict.fromkeys(("ActorAL", "ActorOmni", "ActorVL", "PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"), "lightrft"),
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
