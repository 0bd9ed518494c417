# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Proximal policy optimization (PPO), part by part."""

from dataclasses import replace

from ...algorithms.advantages import gae
from ...algorithms.critic import ptx_loss, value_loss
from ..grpo.method import GRPO


# GRPO with a critic, see [PPO](https://huggingface.co/papers/1707.06347)
PPO = replace(
    GRPO,
    name="ppo",
    advantages=gae,  # of tokens, from the critic's values; with another `advantage_estimator`, GRPO's without a critic
    terms={
        **GRPO.terms,
        "vf_coef": value_loss,  # squared distance of the critic's values from returns, clipped
        "ptx_coef": ptx_loss,  # negative log-likelihood of supervised rows
    },
    defaults={
        **GRPO.defaults,
        "advantage_estimator": "gae",
        "vf_coef": 0.1,
        "ptx_coef": 0.0,
        "num_ppo_epochs": 4,
    },
)
