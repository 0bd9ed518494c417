# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Group relative policy optimization (GRPO), see [DeepSeekMath](https://huggingface.co/papers/2402.03300), section 4.1.

For each prompt q, the model samples a group of completions o_1 ... o_G, and a function rewards each:

    advantage      A_i = (r_i - mean(r)) / (std(r) + 1e-4)              over the group; std divides by G - 1
    ratio          w_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)      pi_old sampled the completion
    token loss     -min(w_t A_i, clip(w_t, 1 - epsilon, 1 + epsilon) A_i) + beta KL_t
    divergence     KL_t = x - log x - 1, where x = pi_ref(o_t | q, o_<t) / pi(o_t | q, o_<t)
    loss           the mean over the tokens of a completion, then over the completions

A step with `iterations` updates (the paper's mu) on the completions of some prompts:

    sampled(model, [completion for group in groups for completion in group])
    for _ in range(iterations):
        descend(model, grpo_loss(model, groups), learning_rate)

TRL and this package differ from the paper by their defaults, which are those of the functions here:

- `loss_type="dapo"` is the mean over all tokens of the step, see [DAPO](https://huggingface.co/papers/2503.14476).
  The paper's is "grpo".
- `corrects_kl=True` multiplies KL_t by w_t, see [DeepSeek-V3.2](https://huggingface.co/papers/2512.02556). The option
  of TRL is `use_bias_correction_kl`. The paper's is `False`.
- `beta=0.0`, where the paper has 0.04. Then no reference is forwarded.
- The standard deviation is that of the group, as in the paper (TRL's `scale_rewards`), but 1e-4 is added to it.
"""

import torch
from transformers import PreTrainedModel

from .forward import Completion, log_probabilities


def group_advantages(rewards: list[float]) -> torch.Tensor:
    """Returns the advantages of a group's completions, `(G,)`."""
    r = torch.tensor(rewards, dtype=torch.float64)
    return (r - r.mean()) / (r.std() + 1e-4)


def grpo_loss(
    model: PreTrainedModel,
    groups: list[list[Completion]],
    reference: PreTrainedModel | None = None,
    *,
    epsilon: float = 0.2,
    beta: float = 0.0,
    corrects_kl: bool = True,
    loss_type: str = "dapo",
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the loss of a step. Each group has the completions of one prompt."""
    token_losses = []
    for group in groups:
        advantages = group_advantages([completion.reward for completion in group])
        for completion, advantage in zip(group, advantages, strict=True):
            new = log_probabilities(model, completion, temperature)
            ratio = (new - completion.old).exp()
            clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)
            if reference is not None:
                with torch.no_grad():
                    log_reference = log_probabilities(reference, completion, temperature)
                log_x = log_reference - new
                divergence = log_x.exp() - log_x - 1
                losses = losses + beta * divergence * (ratio if corrects_kl else 1)
            token_losses.append(losses)
    if loss_type == "grpo":
        return torch.stack([losses.mean() for losses in token_losses]).mean()
    return torch.cat(token_losses).mean()
