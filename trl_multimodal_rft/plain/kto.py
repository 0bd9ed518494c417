# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Kahneman-Tversky optimization (KTO), see [KTO](https://huggingface.co/papers/2402.01306), equations 7 and 8.

For prompts q with answers y, each of which is labelled as desirable or undesirable:

    log-ratio      h(q, y) = log(pi(y | q) / pi_ref(y | q))    a sum over the tokens of the answer
    divergence     z = max(0, mean over i of h(q_i, y_j)), where the answer is that of another prompt; no gradient
    answer's loss  desirable_weight (1 - sigmoid(beta (h(q, y) - z))) of a desirable one
                   undesirable_weight (1 - sigmoid(beta (z - h(q, y)))) of an undesirable one
    loss           the mean over answers

A step:

    answers = [encode_answer(processor, messages, answer), ...]
    descend(model, kto_loss(model, reference, answers, [True, False, ...]), learning_rate)

The divergence z is estimated from mismatched pairs of the batch. TRL and this package pair a prompt with the answer of
the row before it in the micro-batch, and the first prompt with the last answer. So z depends on the order of rows, and
on the micro-batches if a step has several.
"""

import torch
from transformers import PreTrainedModel

from .forward import Completion, log_ratio


@torch.no_grad()
def divergence(model: PreTrainedModel, reference: PreTrainedModel, answers: list[Completion]) -> torch.Tensor:
    """Returns the estimate z of the divergence from the reference, a scalar of at least 0."""
    ids = [answer.ids for answer in answers]
    mismatched = [Completion(answer.prompt, ids[i - 1]) for i, answer in enumerate(answers)]
    return torch.stack([log_ratio(model, reference, pair) for pair in mismatched]).mean().clamp(min=0)


def kto_loss(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    answers: list[Completion],
    labels: list[bool],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Returns the loss of a step. Labels are `True` for desirable answers."""
    z = divergence(model, reference, answers)
    losses = []
    for answer, is_desirable in zip(answers, labels, strict=True):
        h = log_ratio(model, reference, answer)
        if is_desirable:
            losses.append(desirable_weight * (1 - (beta * (h - z)).sigmoid()))
        else:
            losses.append(undesirable_weight * (1 - (beta * (z - h)).sigmoid()))
    return torch.stack(losses).mean()
