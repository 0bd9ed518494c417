# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Distillation on the student's own completions, see
[On-Policy Distillation of Language Models](https://huggingface.co/papers/2306.13649).

For each prompt q, the student p samples completions o. At each of their tokens, the student's distribution over the
vocabulary is compared with that of the teacher t after the same tokens:

    mixture        m = beta t + (1 - beta) p
    divergence     beta KL(t || m) + (1 - beta) KL(p || m)    the generalized Jensen-Shannon divergence
    loss           the mean over all tokens of the step

A step:

    descend(student, distillation_loss(student, teacher, completions), learning_rate)

This divergence is 0 at `beta=0` and at `beta=1`. There, the loss is its limit after a division by beta or 1 - beta:
KL(t || p) or KL(p || t). TRL's default is `beta=1`. As in the paper, the gradient doesn't flow through the sampling of
completions, and no ratio corrects for completions of an older student.
"""

import torch
from transformers import PreTrainedModel

from .forward import Completion, log_distributions


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns KL(p || q) of the distributions at each token, `(C,)`."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jensen_shannon(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns the divergence at each token, `(C,)`, from log-probabilities `(C, V)`."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def distillation_loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    completions: list[Completion],
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the loss of a step."""
    divergences = []
    for completion in completions:
        with torch.no_grad():
            of_teacher = log_distributions(teacher, completion, temperature)
        of_student = log_distributions(student, completion, temperature)
        divergences.append(jensen_shannon(of_student, of_teacher, beta))
    return torch.cat(divergences).mean()
