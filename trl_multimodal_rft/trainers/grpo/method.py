# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Group relative policy optimization (GRPO) and its relatives, part by part."""

from ...algorithms.advantages import estimate_advantages
from ...algorithms.losses import grpo_loss, view_term
from ..shared.method import Method


# See [DeepSeekMath](https://huggingface.co/papers/2402.03300)
GRPO = Method(
    name="grpo",
    # By `advantage_estimator`. "group_norm": reward minus the mean reward of the prompt's completions, divided by the
    # standard deviation that `scale_rewards` names
    advantages=estimate_advantages,
    kl=("reward", "loss"),  # by `kl_estimator`: "k1" in the reward; "k2" and "k3" in the loss
    # The policy loss by `loss_type`, the KL divergence times `beta`, and the entropy bonus. "dapo": PPO's loss with a
    # clipped ratio per token, averaged over the tokens of an update
    loss=grpo_loss,
    terms={"loss_view": view_term},  # the same completions under a view of the media
    defaults={
        "advantage_estimator": "group_norm",
        "scale_rewards": "group",
        "num_generations": 8,
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
    },
)
