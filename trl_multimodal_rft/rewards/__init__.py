# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward functions with the signature of TRL's: `f(completions, **columns) -> list[float | None]`."""

from .answers import accuracy_reward, format_reward
from .choices import choice_reward
from .model import RewardModel
from .recipe import apply_recipe
from .remote import RemoteReward


__all__ = ["RemoteReward", "RewardModel", "accuracy_reward", "apply_recipe", "choice_reward", "format_reward"]
