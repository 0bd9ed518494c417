# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Divergence from a teacher of another tokenizer, on the spans of a text that both tokenizers cut alike."""

import torch


def span_divergence(logps: torch.Tensor, teacher_logps: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """
    Estimates the reverse KL divergence, in nats, on spans of text that both tokenizers cut alike, as in TRL's
    [GOLD](https://huggingface.co/docs/trl/gold_trainer). A token has its span's difference of log-probabilities over
    its number of tokens, but the gradient of the whole; tokens in no span (-1) have 0. All shapes are `(B, C)`.
    """
    is_aligned = spans >= 0
    index = spans.clamp(min=0)
    student = torch.where(is_aligned, logps, 0)
    values = student.detach()
    totals = torch.zeros_like(values).scatter_add(1, index, values).gather(1, index)
    counts = torch.zeros_like(values).scatter_add(1, index, is_aligned.to(values)).gather(1, index)
    differences = torch.where(is_aligned, totals - teacher_logps.to(values), 0)
    return differences / counts.clamp(min=1) + differences * (student - values)
