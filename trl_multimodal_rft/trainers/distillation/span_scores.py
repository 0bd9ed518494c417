# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scores of the text of completions, by teachers of another tokenizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...algorithms.metrics import Metric, event_count, scored_mean
from ...encoding.dummies import dummy_prompt
from ...encoding.processors import control_tokens, tokenizer_of
from ...encoding.prompt_encoder import PromptEncoder
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...encoding.spans import common_spans, end_of_answer, text_ids, token_text
from ...forward.scores import ScoreRequest
from ...policy import PolicyForward
from ...rollout.completion_columns import right_pad
from ...rollout.ranks import sum_over_ranks
from ...rollout.rollout import Rollout
from ..sampling.context import Context
from ..sampling.prompting import Prompting


class _Alignment(NamedTuple):
    """A completion as a teacher's tokens, and the spans that both tokenizers cut alike."""

    spans: list[int]  # index of the span of each of the student's tokens, -1 in none
    teacher_ids: list[int]
    teacher_spans: list[int]


def span_scores(
    context: Context,
    alignments: Sequence[_Alignment],
    width: int,
    prompts: Sequence[EncodedPrompt],
    model: Any,
    policy: PolicyForward,
    encoder: PromptEncoder,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the spans of aligned completions, and the teacher's log-probabilities of these, both on each token of the
    student, `(len(alignments), width)`. All ranks must call this, also without completions.
    """
    spans = torch.full((len(alignments), width), -1)
    logps = torch.zeros(len(alignments), width, dtype=torch.float32)
    ids = [alignment.teacher_ids for alignment in alignments]
    of_tokens = _logps(context, prompts, ids, model, policy, encoder)
    for row, alignment in enumerate(alignments):
        spans[row, : len(alignment.spans)] = torch.tensor(alignment.spans, dtype=torch.long)
        teacher_spans = torch.tensor(alignment.teacher_spans, dtype=torch.long)
        is_aligned = teacher_spans >= 0
        totals = torch.zeros(width, dtype=torch.float32)
        totals.index_add_(0, teacher_spans[is_aligned], of_tokens[row, : len(teacher_spans)][is_aligned])
        logps[row] = torch.where(spans[row] >= 0, totals[spans[row].clamp(min=0)], 0)
    return spans, logps


def aligner(
    prompting: Prompting, end_ids: Sequence[int], encoder: PromptEncoder
) -> Callable[[Rollout, int], _Alignment]:
    """
    Returns a function that aligns the completion at a batch index with the teacher's tokens. Control tokens of the
    student are left out, but for the last, which is aligned with the token by which the teacher ends an answer.
    """
    tokenizer = prompting.tokenizer
    teacher_tokenizer = tokenizer_of(encoder.processor)
    placeholders = all_placeholder_ids(encoder.model, encoder.processor)
    chat_end = end_of_answer(encoder.processor)
    control_ids = {tokenizer.convert_tokens_to_ids(token) for token in control_tokens(tokenizer)}
    ends = {*end_ids, tokenizer.pad_token_id}

    def align(rollout: Rollout, index: int) -> _Alignment:
        ids = rollout.source.ids[index]
        has_end = bool(ids) and rollout.source.ended[index] and ids[-1] in ends
        positions = [i for i, token_id in enumerate(ids[: len(ids) - has_end]) if token_id not in control_ids]
        student = token_text([ids[i] for i in positions], tokenizer)
        teacher_ids = text_ids(student.text, teacher_tokenizer)
        # A text that spells a placeholder ends there, as the teacher would look for a medium
        stop = next((i for i, token_id in enumerate(teacher_ids) if token_id in placeholders), None)
        teacher_ids = teacher_ids[:stop]
        common = common_spans(student, token_text(teacher_ids, teacher_tokenizer))
        spans = [-1] * len(ids)
        for i, span in zip(positions, common.first, strict=True):
            spans[i] = span
        end = teacher_tokenizer.eos_token_id if isinstance(rollout.source.messages[index], str) else chat_end
        if not (has_end and end is not None and common.is_whole):
            return _Alignment(spans, teacher_ids, common.second)
        spans[-1] = max(spans, default=-1) + 1
        return _Alignment(spans, [*teacher_ids, end], [*common.second, spans[-1]])

    return align


def _logps(
    context: Context,
    prompts: Sequence[EncodedPrompt],
    ids: Sequence[list[int]],
    model: Any,
    policy: PolicyForward,
    encoder: PromptEncoder,
) -> torch.Tensor:
    """Returns the log-probabilities of the teacher's tokens, `(N, T)`, on the CPU."""
    device = context.accelerator.device
    size = context.batch_size
    # With sharded weights, all ranks run as many forwards
    counts = context.accelerator.gather(torch.tensor([math.ceil(len(ids) / size)], device=device))
    padded = right_pad(ids, 0).to(device)
    mask = right_pad([[1] * len(row) for row in ids], 0).to(device)
    logps = torch.zeros(padded.shape, dtype=torch.float32)
    for start in range(0, int(counts.max()) * size, size):
        part = slice(start, start + size)
        if start < len(ids):
            packed = policy.worth_packing(prompts[part], [len(row) for row in ids[part]], size, encoder.model)
            request = ScoreRequest(prompts[part], padded[part], mask[part], packed)
            logps[part] = policy.score(model, request).logps.float().cpu()
        else:
            one = torch.ones(1, 1, dtype=torch.long, device=device)
            dummy = dummy_prompt(None, encoder.processor, encoder.model)
            policy.score(model, ScoreRequest([dummy], one * 0, one, packed=False))
    for prompt in prompts:
        prompt.on_device.clear()
    return logps


def taught_mask(rollout: Rollout) -> torch.Tensor:
    """Returns the loss mask `(N, C)` without tokens in no span of text that a teacher's tokenizer cuts alike."""
    mask = rollout.loss_mask
    return mask if rollout.teacher.spans is None else mask * (rollout.teacher.spans >= 0).to(mask)


def aligned_metrics(rollout: Rollout, names: Mapping[int, str | None], indices: Sequence[int]) -> dict[str, Metric]:
    """Returns the share of the tokens in the loss that are aligned, by teacher."""
    is_aligned = (rollout.teacher.spans >= 0).float()
    teachers = torch.tensor(indices, device=is_aligned.device)
    metrics: dict[str, Metric] = {}
    for index, name in names.items():
        mask = rollout.loss_mask * (teachers == index)[:, None].to(rollout.loss_mask)
        aligned = scored_mean(is_aligned, mask)
        if name is None:
            metrics["teacher/aligned_frac"] = aligned
        else:
            metrics[f"teacher/{name}/aligned_frac"] = aligned
    return metrics


def has_aligned(
    prompting: Prompting, rollout: Rollout, labels: Mapping[int, str], indices: Sequence[int]
) -> torch.Tensor:
    """Returns `(N,)`, false where nothing of a completion is aligned, or raises a `ValueError` for the first."""
    context = prompting.context
    is_unaligned = rollout.loss_mask.any(1) & ~taught_mask(rollout).any(1)
    is_unaligned &= torch.tensor([index in labels for index in indices], device=is_unaligned.device)
    unaligned = is_unaligned.nonzero()[:, 0].tolist()
    if unaligned and context.args.teacher_processor_settings.on_unaligned == "raise":
        first = unaligned[0]
        text = prompting.tokenizer.decode(rollout.source.ids[first])
        raise ValueError(
            f"row {rollout.source.row_indices[first]}: no token of the completion {text!r} can be aligned with "
            f"tokens of {labels[indices[first]]}; set `teacher_processor=\"separate(on_unaligned='skip')\"` to leave "
            "such completions out, or choose another teacher."
        )
    (n_unaligned,) = sum_over_ranks(context.accelerator, [len(unaligned)])
    context.metrics.add({"teacher/unaligned": event_count(n_unaligned)})
    return ~is_unaligned
