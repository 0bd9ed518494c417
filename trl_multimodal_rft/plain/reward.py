# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Reward models from comparisons, see
[Learning to summarize from human feedback](https://huggingface.co/papers/2009.01325), section 3.4.

For each prompt q, one answer, y, was preferred to another, z. A model whose head gives one number scores an answer by
the state at its last token:

    pair's loss    -log sigmoid(r(q, y) - r(q, z) - margin), by the model of Bradley and Terry
    loss           the mean over pairs

A step:

    pair = encode_answer(processor, messages, chosen), encode_answer(processor, messages, rejected)
    descend(model, reward_loss(model, [pair, ...]), learning_rate)

The margin of a pair, 0 in the paper, is from [Llama 2](https://huggingface.co/papers/2307.09288), and in TRL a column
of the dataset. TRL's `center_rewards_coefficient` is off by default, and not here.
"""

import torch
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from .forward import Completion, row_of


def score(model: PreTrainedModel, answer: Completion) -> torch.Tensor:
    """Returns a reward model's score of an answer, a scalar. The model's logits are the score at the last token."""
    return model(**row_of(answer)).logits[0, 0]


def reward_loss(
    model: PreTrainedModel,
    pairs: list[tuple[Completion, Completion]],
    margins: list[float] | None = None,
) -> torch.Tensor:
    """Returns the loss of a step. The first answer of a pair was preferred."""
    losses = []
    for i, (chosen, rejected) in enumerate(pairs):
        margin = 0.0 if margins is None else margins[i]
        losses.append(-logsigmoid(score(model, chosen) - score(model, rejected) - margin))
    return torch.stack(losses).mean()
