# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Supervised training on answers (SFT), see [InstructGPT](https://huggingface.co/papers/2203.02155), section 3.5.

For prompts q and answers o that someone wrote:

    token loss     -log pi(o_t | q, o_<t)
    loss           the mean over all tokens of the answers of a step

A step:

    descend(model, sft_loss(model, [encode_answer(processor, messages, answer), ...]), learning_rate)

The mean is over tokens and not first over answers, so a long answer counts more than a short one. TRL also learns the
prompt's tokens if a dataset has whole texts, without `prompt` and `completion`; its option `loss_type="nll"` is the
loss here.
"""

import torch
from transformers import PreTrainedModel

from .forward import Completion, log_probabilities


def sft_loss(model: PreTrainedModel, answers: list[Completion]) -> torch.Tensor:
    """Returns the loss of a step."""
    return -torch.cat([log_probabilities(model, answer) for answer in answers]).mean()
