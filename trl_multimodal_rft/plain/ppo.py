# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Proximal policy optimization (PPO), see [PPO](https://huggingface.co/papers/1707.06347), with the advantages of
[Generalized Advantage Estimation](https://huggingface.co/papers/1506.02438).

A policy samples a completion o of each prompt q, and a function rewards it. A critic V of the policy's architecture
estimates the rewards to come in the state before each token. Once per batch of completions, before any update:

    token's reward r_t = -beta log(pi_old(o_t) / pi_ref(o_t)), plus the completion's reward at the last token
    error          delta_t = r_t + gamma V_{t+1} - V_t          V = 0 after the last token
    advantage      A_t = delta_t + gamma lam A_{t+1}            the sum of discounted errors
    return         R_t = A_t + V_t
    whitening      A_t minus the mean, divided by the standard deviation, over all tokens of the batch

In each of several updates on the batch, with w_t = pi(o_t) / pi_old(o_t), the mean over all tokens of

    policy         -min(w_t A_t, clip(w_t, 1 - epsilon, 1 + epsilon) A_t)
    critic         vf_coef max((V_t - R_t)^2, (clip(V_t, V_old,t - cliprange, V_old,t + cliprange) - R_t)^2) / 2

The steps are:

    sampled(model, completions)
    batch = estimated(critic, head, completions, reference)
    for _ in range(4):
        descend(ModuleList([model, critic, head]), ppo_loss(model, critic, head, batch), learning_rate)

The penalty by the reference, 0 by default, is from
[Fine-Tuning Language Models from Human Preferences](https://huggingface.co/papers/1909.08593). Clipped values and
whitening are those of the code of PPO's authors. The paper also has an entropy bonus, which this package leaves out by
default. The mean over all tokens is the default `loss_type="dapo"`.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .forward import Completion, log_probabilities, row_of


@dataclass
class Estimate:
    """A completion of C tokens with what the critic made of it before the first update; tensors are `(C,)`."""

    completion: Completion
    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


def values_of(critic: PreTrainedModel, head: nn.Linear, completion: Completion) -> torch.Tensor:
    """Returns the critic's value of the state before each token of a completion, `(C,)`."""
    start = completion.prompt["input_ids"].size(1)
    states = critic.base_model(**row_of(completion)).last_hidden_state[0, start - 1 : -1]
    return head(states)[:, 0]


def discounted_advantages(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Returns the advantage of each token of a completion, `(C,)`."""
    advantages = torch.zeros_like(values)
    next_value = torch.tensor(0.0)
    next_advantage = torch.tensor(0.0)
    for t in reversed(range(len(values))):
        error = rewards[t] + gamma * next_value - values[t]
        advantages[t] = error + gamma * lam * next_advantage
        next_value = values[t]
        next_advantage = advantages[t]
    return advantages


@torch.no_grad()
def estimated(
    critic: PreTrainedModel,
    head: nn.Linear,
    completions: list[Completion],
    reference: PreTrainedModel | None = None,
    *,
    beta: float = 0.0,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> list[Estimate]:
    """Returns completions, which [`~forward.sampled`] has scored, with returns and whitened advantages."""
    batch = []
    for completion in completions:
        rewards = torch.zeros(len(completion.ids), dtype=torch.float64)
        rewards[-1] = completion.reward
        if reference is not None:
            rewards -= beta * (completion.old - log_probabilities(reference, completion))
        values = values_of(critic, head, completion)
        advantages = discounted_advantages(rewards, values, gamma, lam)
        batch.append(Estimate(completion, values, advantages + values, advantages))
    every = torch.cat([estimate.advantages for estimate in batch])
    for estimate in batch:
        estimate.advantages = (estimate.advantages - every.mean()) / every.std(correction=0)
    return batch


def ppo_loss(
    model: PreTrainedModel,
    critic: PreTrainedModel,
    head: nn.Linear,
    batch: list[Estimate],
    *,
    epsilon: float = 0.2,
    vf_coef: float = 0.1,
    cliprange: float = 0.2,
) -> torch.Tensor:
    """Returns the loss of an update of policy and critic."""
    token_losses = []
    for estimate in batch:
        ratio = (log_probabilities(model, estimate.completion) - estimate.completion.old).exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        policy = -torch.minimum(ratio * estimate.advantages, clipped * estimate.advantages)
        values = values_of(critic, head, estimate.completion)
        near = estimate.values + (values - estimate.values).clamp(-cliprange, cliprange)
        errors = torch.maximum((values - estimate.returns).square(), (near - estimate.returns).square())
        token_losses.append(policy + vf_coef * errors / 2)
    return torch.cat(token_losses).mean()
