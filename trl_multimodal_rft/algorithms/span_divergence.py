# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Divergence from a teacher of another tokenizer, on the spans of a text that both tokenizers cut alike."""

import torch


def span_divergence(logps: torch.Tensor, teacher_logps: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    r"""
    Estimates the reverse KL divergence of a student from a teacher on spans of sampled tokens, in nats.

    A span $s$ is a text that begins and ends where tokens of both tokenizers do, as in TRL's
    [GOLD](https://huggingface.co/docs/trl/gold_trainer). Its difference is

    $$d_s = \sum_{t \in s} \log \pi(y_t) - \sum_{u \in s} \log \pi_T(z_u),$$

    where the student's tokens $y$ were sampled, and the teacher's tokens $z$ spell the same text. Each of the $n_s$
    tokens of the student has the value $d_s / n_s$ and the gradient $d_s \nabla \log \pi(y_t)$. So the values of a
    completion add up to the differences of its spans, and their mean over samples of the student has the gradient of
    the spans' divergence. With spans of one token each, that is the divergence of tokens, estimated by the sampled
    ones.

    Args:
        logps (`torch.Tensor`):
            Log-probabilities of the sampled tokens under the student, shape `(B, C)`.
        teacher_logps (`torch.Tensor`):
            Log-probability of each token's span under the teacher, shape `(B, C)`.
        spans (`torch.Tensor`):
            Index of each token's span in its completion, at most `C - 1`, or -1 in none, shape `(B, C)`.

    Returns:
        `torch.Tensor`: The divergence, shape `(B, C)`, 0 for tokens in no span.
    """
    is_aligned = spans >= 0
    index = spans.clamp(min=0)
    student = torch.where(is_aligned, logps, 0)
    values = student.detach()
    totals = torch.zeros_like(values).scatter_add(1, index, values).gather(1, index)
    counts = torch.zeros_like(values).scatter_add(1, index, is_aligned.to(values)).gather(1, index)
    differences = torch.where(is_aligned, totals - teacher_logps.to(values), 0)
    return differences / counts.clamp(min=1) + differences * (student - values)
