# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""REINFORCE leave-one-out (RLOO), part by part."""

from ...algorithms.losses import rloo_loss
from ...rollout.estimates import leave_one_out
from ..shared.method import Method


# See [Back to Basics](https://huggingface.co/papers/2402.14740)
RLOO = Method(
    name="rloo",
    # Reward minus the mean reward of the prompt's other completions, normalized with `normalize_advantages`
    advantages=leave_one_out,
    kl=("reward",),  # `beta` times the log-ratio of a completion to the reference, subtracted from its reward
    loss=rloo_loss,  # PPO's clipped ratio, one per completion
    defaults={
        "normalize_advantages": False,
        "reward_clip_range": None,
        "num_generations": 2,
        "num_iterations": 1,
        "beta": 0.05,
        "epsilon": 0.2,
    },
)
