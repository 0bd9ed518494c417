# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Direct preference optimization (DPO), see
[Direct Preference Optimization](https://huggingface.co/papers/2305.18290), equation 7.

For each prompt q, one answer, y, was preferred to another, z:

    log-ratio      h(y) = log(pi(y | q) / pi_ref(y | q))     a sum over the tokens of the answer
    pair's loss    -log sigmoid(beta (h(y) - h(z)))
    loss           the mean over pairs

A step:

    pair = encode_answer(processor, messages, chosen), encode_answer(processor, messages, rejected)
    descend(model, dpo_loss(model, reference, [pair, ...]), learning_rate)

TRL's default `loss_type=["sigmoid"]` is this loss. The tokens of an answer include those that end its turn.
"""

import torch
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from .forward import Completion, log_ratio


def dpo_loss(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    pairs: list[tuple[Completion, Completion]],
    *,
    beta: float = 0.1,
) -> torch.Tensor:
    """Returns the loss of a step. The first answer of a pair was preferred."""
    losses = []
    for chosen, rejected in pairs:
        difference = log_ratio(model, reference, chosen) - log_ratio(model, reference, rejected)
        losses.append(-logsigmoid(beta * difference))
    return torch.stack(losses).mean()
