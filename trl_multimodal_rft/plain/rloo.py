# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
REINFORCE leave-one-out (RLOO), see [Back to Basics](https://huggingface.co/papers/2402.14740).

For each prompt q, the model samples k completions o_1 ... o_k, and a function rewards each:

    reward         R_i = r_i - beta log(pi_old(o_i | q) / pi_ref(o_i | q))      of the whole completion
    advantage      A_i = R_i minus the mean reward of the prompt's other completions
    gradient       of -A_i log pi(o_i | q), the mean over completions

A step, in which the reference enters through the rewards alone:

    sampled(model, [completion for group in groups for completion in group])
    advantages = leave_one_out_advantages(groups, reference)
    descend(model, rloo_loss(model, groups, advantages), learning_rate)

TRL and this package differ from the paper in the loss. It has PPO's clipped ratio of the completion,

    loss           -min(w A_i, clip(w, 1 - epsilon, 1 + epsilon) A_i), where w = pi(o_i | q) / pi_old(o_i | q)

whose gradient in the first update after sampling, where w = 1, is the paper's. Here are no `normalize_advantages` and
`reward_clip_range`, which are off by default.
"""

import torch
from transformers import PreTrainedModel

from .forward import Completion, log_probabilities


def leave_one_out_advantages(
    groups: list[list[Completion]],
    reference: PreTrainedModel | None = None,
    *,
    beta: float = 0.05,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """
    Returns the advantages of each group's completions, `(k,)`, which [`~forward.sampled`] has scored. Without a
    reference, there is no penalty.
    """
    advantages = []
    for group in groups:
        rewards = torch.tensor([completion.reward for completion in group], dtype=torch.float64)
        if reference is not None:
            for i, completion in enumerate(group):
                with torch.no_grad():
                    log_ratios = completion.old - log_probabilities(reference, completion, temperature)
                rewards[i] -= beta * log_ratios.sum()
        others = (rewards.sum() - rewards) / (len(group) - 1)
        advantages.append(rewards - others)
    return advantages


def rloo_loss(
    model: PreTrainedModel,
    groups: list[list[Completion]],
    advantages: list[torch.Tensor],
    *,
    epsilon: float = 0.2,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the loss of a step. Each group has the completions of one prompt."""
    losses = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        for completion, advantage in zip(group, group_advantages, strict=True):
            log_ratios = log_probabilities(model, completion, temperature) - completion.old
            ratio = log_ratios.sum().exp()
            clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean()
