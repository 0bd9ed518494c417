# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Prompts of a teacher that sees the best other completion of a group, as in
[Reinforcement Learning via Self-Distillation](https://huggingface.co/papers/2601.20802).
"""

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from ...algorithms.metrics import nan_mean
from ...encoding.processors import checked_texts
from ...encoding.prompts import EncodedPrompt
from ...forward.trees import share_media
from ...rollout.estimates import rewards_per_func
from ...rollout.rollout import Rewards, Rollout
from ..sampling.context import Context
from ..sampling.prompting import Prompting
from .teachers import prompts_under_view


# What follows the question in the teacher's prompt
_CONTEXT = "\n\nAn answer that was judged to be right:\n\n{answer}\n\nNow answer the question in your own words."


class _Answer(NamedTuple):
    """A completion of any rank."""

    group: int
    index: int  # among the completions of all ranks
    reward: float
    text: str


def choose_best(prompting: Prompting, rollout: Rollout, rewards: Rewards, min_reward: float) -> list[str | None]:
    """
    Returns for each completion the text of the best other completion of its group, `None` if none reaches
    `min_reward`; the first of equal ones counts. A reward is the sum over functions that don't give `None`. All ranks
    must call this.
    """
    per_func = rewards_per_func(rewards.by_completion)
    totals = torch.where(per_func.isnan().all(1), math.nan, per_func.nansum(1)).tolist()
    tokenizer = prompting.tokenizer
    first = prompting.context.accelerator.process_index * len(rollout)
    answers = [
        _Answer(group, first + i, totals[i], str(tokenizer.decode(rollout.source.ids[i], skip_special_tokens=True)))
        for i, group in enumerate(rollout.group_ids.tolist())
    ]
    by_group: dict[int, list[_Answer]] = {}
    for answer in map(_Answer._make, gather_object(answers)):
        if answer.reward >= min_reward:  # false for NaN
            by_group.setdefault(answer.group, []).append(answer)
    texts: list[str | None] = []
    for answer in answers:
        others = [other for other in by_group.get(answer.group, []) if other.index != answer.index]
        texts.append(max(others, key=lambda other: (other.reward, -other.index)).text if others else None)
    _log(prompting.context, totals, texts)
    return texts


def _log(context: Context, totals: list[float], texts: list[str | None]) -> None:
    numbers = torch.tensor([[reward, float(text is not None)] for reward, text in zip(totals, texts, strict=True)])
    numbers = context.accelerator.gather(numbers.to(context.accelerator.device))
    metrics = {"reward": numbers[:, 0], "teacher/taught_frac": numbers[:, 1]}
    context.metrics.add({name: nan_mean(values, is_of_all_ranks=True) for name, values in metrics.items()})


def prompts_with(
    prompting: Prompting, rollout: Rollout, texts: list[str | None], prompts: list[EncodedPrompt]
) -> list[EncodedPrompt]:
    """
    Returns the teacher's prompts, with a completion behind the question where there is one in `texts`, else those in
    `prompts`. Completions of a row with the same text share a prompt.
    """
    encoded: dict[tuple[int, str], EncodedPrompt] = {}
    messages = [*rollout.source.messages]
    told = [*prompts]
    for i, text in enumerate(texts):
        if text is None:
            continue
        row = rollout.source.row_indices[i]
        label = f"row {row}, a completion in the teacher's prompt"
        messages[i] = _with_answer(messages[i], checked_texts(text, prompting.encoder.processor, "strip", label))
        key = int(rollout.group_ids[i]), text
        if key not in encoded:
            encoded[key] = prompting.encoder.encode(messages[i], row)
        told[i] = encoded[key]
    source = replace(rollout.source, messages=messages)
    view = prompting.context.args.teacher_view
    told = prompts_under_view(prompting, replace(rollout, prompts=told, source=source), view)
    share_media(told)
    return told


def _with_answer(prompt: str | list[dict[str, Any]], answer: str) -> str | list[dict[str, Any]]:
    context = _CONTEXT.format(answer=answer)
    if isinstance(prompt, str):
        return prompt + context
    messages = [copy.copy(message) for message in prompt]
    message = next(message for message in reversed(messages) if message["role"] == "user")
    content = message["content"]
    is_text = isinstance(content, str)
    message["content"] = content + context if is_text else [*content, {"type": "text", "text": context}]
    return messages
