# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What TRL's signatures can't carry."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..encoding.prompts import EncodedPrompt
from ..forward.scores import Scores
from ..generation.transformers import Branches
from ..policy import Completions


@dataclass
class Batch:
    """
    What belongs to the completions that TRL's code works on: those of a rollout, or of a micro-batch whose loss is
    computed.

    Args:
        of_inputs (`bool`, *optional*, defaults to `False`):
            Whether it is a generation batch, or a part of one, rather than a rollout.
        prompts (`list[EncodedPrompt]`, *optional*):
            Each completion's prompt; `None` until prompts are encoded, and where `rollout_func` makes its own.
        messages (`list`, *optional*):
            In a rollout, what these were encoded from.
        packed (`bool`, *optional*):
            Whether completions share a forward of their prompt; `None` until that is decided.
        continued (`list[EncodedPrompt]`, *optional*):
            In a rollout, while completions go on behind what tools returned, each of these up to there.
        branches ([`~generation.transformers.Branches`], *optional*):
            In a rollout with tools, what generation goes on with behind what these return.
        room (`list[int]`, *optional*):
            Meanwhile, how many tokens each may still have.
        rows (`list[dict]`, *optional*):
            In a rollout, the rows as the dataset has them.
        numbers (`list[int]`, *optional*):
            In a rollout, the numbers of these rows.
        encoded (`list[EncodedPrompt]`, *optional*):
            In a rollout, each row's prompt, where it was encoded with the row alone.
        sampled_logps (`list[list[float]]`, *optional*):
            In a rollout, the log-probabilities of an engine, where TRL's trainer doesn't take them.
        completions (`list[list[dict]]`, *optional*):
            In a rollout with tools, the messages of each completion, with the media of results.
        tool_mask (`list[list[int]]` or `torch.Tensor`, *optional*):
            1 on tokens that were sampled, where TRL's trainer doesn't know of others.
        extra (`dict[str, Any]`, *optional*):
            In a rollout, what `rollout_func` says beside completions, where TRL's trainer doesn't take it.
        rewards_per_func (`torch.Tensor`, *optional*):
            In a rollout, the rewards of all processes' completions, `(N, F)`.
        scores (`list[Scores]`, *optional*):
            Scores of the completions, in the order in which TRL's code asked for them.
        current ([`~forward.scores.Scores`], *optional*):
            In a loss, the scores with gradients, once they are computed.
        hands_out_current (`bool`, *optional*, defaults to `False`):
            Whether TRL's loss is at work, which asks for these scores.
        supervised (`tuple`, *optional*):
            In a loss of PPO, prompts, supervised completions and their mask.
        token_weights (`torch.Tensor`, *optional*):
            In a loss, the weight of each token in it, `(B, C)`; `None` for 1.
    """

    of_inputs: bool = False
    prompts: list[EncodedPrompt] | None = None
    messages: Any = None
    packed: bool | None = None
    continued: list[EncodedPrompt] | None = None
    branches: Branches | None = None
    room: list[int] | None = None
    rows: list[dict[str, Any]] | None = None
    numbers: list[int] | None = None
    encoded: list[EncodedPrompt | None] | None = None
    sampled_logps: list[list[float | None]] | None = None
    completions: list[list[dict[str, Any]]] | None = None
    tool_mask: Any = None
    extra: dict[str, Any] | None = None
    rewards_per_func: Any = None
    scores: list[Scores] = field(default_factory=list)
    current: Scores | None = None
    hands_out_current: bool = False
    supervised: Completions | None = None
    token_weights: torch.Tensor | None = None
