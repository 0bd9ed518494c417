# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions in which a tool returned media, against the model's own forward of the whole conversation."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from ..encoding.conversations import Conversation
from ..encoding.prompts import EncodedPrompt, join_media
from ..models.modes import measuring
from ..policy import Fallbacks, PolicyForward
from .measure import Measure


def check_conversation(
    policy: PolicyForward,
    model: nn.Module,
    prompts: Sequence[EncodedPrompt],
    completion_ids: Sequence[list[int]],
    engine_positions: bool = False,
) -> tuple[float, Fallbacks] | None:
    """
    Measures a completion in which a tool returned media, and finds the fallbacks that it needs; `None` if no process
    has one.
    """
    held = [
        (prompt, ids)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
        if isinstance(prompt, Conversation) and len(ids) > len(prompt.later)
    ][:1]
    holders = [process for process, holds in enumerate(gather_object([bool(held)])) if holds]
    if not holders:
        return None
    measure = Measure(policy, model, engine_positions)
    is_holder = measure.accelerator.process_index == holders[0]
    prompt, ids = broadcast_object_list(held if is_holder else [None], from_process=holders[0])[0]
    with measuring(model, measure.device):
        difference = _after_tool_media(measure, prompt, ids)
    return difference, measure.fallbacks


def _after_tool_media(measure: Measure, prompt: Conversation, completion_ids: list[int]) -> float:
    """How far what follows the last result of a tool is from the model's own forward of all of it."""
    later, n = prompt.later, len(prompt.later)
    whole = EncodedPrompt(
        torch.cat([prompt.input_ids, later.input_ids]),
        {name: torch.cat([value, later.token_fields[name]]) for name, value in prompt.token_fields.items()},
        join_media(prompt.parts),
        torch.cat([prompt.position_ids, later.position_ids], dim=-1),
    )
    tokens = {"input_ids": whole.input_ids, **whole.token_fields}
    inputs = measure.model_inputs({**{name: value[None] for name, value in tokens.items()}, **whole.media})
    ids = torch.tensor([completion_ids], device=measure.device)
    mask = torch.ones_like(ids)
    truth = measure.model_logps(inputs, whole, ids[:, n:])
    if truth is None:
        raise measure.inexact(f"its own forward fails on a conversation with tool media ({measure.failure})")
    packed = measure.fallbacks.packing
    scores = measure.attempt(
        "scoring a conversation",
        lambda: measure.score([replace(prompt, mask_cache={})], ids, mask, packed=packed)[:, n:],
    )
    difference = measure.difference(scores, truth, mask[:, n:])
    if difference <= measure.tolerance:
        return difference
    found = f"log-probabilities after tool media differ by {difference:.0e} from those of its own forward"
    if not packed:
        raise measure.inexact(found)
    measure.warn(found, "padded rows")
    measure.fallbacks.packing = False
    return _after_tool_media(measure, prompt, completion_ids)
