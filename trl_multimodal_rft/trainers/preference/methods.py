# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Methods that learn from completions that people have compared or labelled, part by part. Their losses are TRL's."""

from ...algorithms.preferences import anchored_preference, conditional_preference
from ..shared.method import Method


# From pairs, see [DPO](https://huggingface.co/papers/2305.18290). `beta` weighs the reference in the loss
DPO = Method(
    name="dpo",
    kl=("loss",),
    # Of `rejected_view`, see [mDPO](https://huggingface.co/papers/2406.11839)
    terms={"conditional_coef": conditional_preference, "anchor_coef": anchored_preference},
    defaults={"beta": 0.1, "loss_type": ["sigmoid"]},
)

# From single completions with labels, see [KTO](https://huggingface.co/papers/2402.01306)
KTO = Method(
    name="kto",
    kl=("loss",),
    defaults={"beta": 0.1, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
)

# A reward model from pairs, by the likelihood of Bradley and Terry, see
# [Learning to summarize from human feedback](https://huggingface.co/papers/2009.01325)
REWARD = Method(name="reward-trainer", defaults={"center_rewards_coefficient": None})
