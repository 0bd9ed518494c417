# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What TRL's signatures can't carry."""

from dataclasses import dataclass, field
from typing import Any

from ..encoding.prompts import EncodedPrompt
from ..forward.scores import Scores
from ..generation.transformers import Branches
from ..policy import Completions


@dataclass
class Batch:
    """
    What belongs to the completions that TRL's code works on: those of a rollout, or of a micro-batch whose loss is
    computed.
    """

    of_inputs: bool = False  # whether it is a generation batch, or a part of one, rather than a rollout
    # Each completion's prompt; `None` until prompts are encoded, and where `rollout_func` makes its own
    prompts: list[EncodedPrompt] | None = None
    messages: Any = None  # in a rollout, what these were encoded from
    packed: bool | None = None  # whether completions share a forward of their prompt; `None` until that is decided
    # In a rollout, while completions go on behind what tools returned, each of these up to there
    continued: list[EncodedPrompt] | None = None
    branches: Branches | None = None  # in a rollout with tools, what generation goes on with behind what these return
    room: list[int] | None = None  # meanwhile, how many tokens each may still have
    rows: list[dict[str, Any]] | None = None  # in a rollout, the rows as the dataset has them
    numbers: list[int] | None = None  # in a rollout, the numbers of these rows
    # In a rollout, each row's prompt, where it was encoded with the row alone
    encoded: list[EncodedPrompt | None] | None = None
    # In a rollout, the log-probabilities of an engine, where TRL's trainer doesn't take them
    sampled_logps: list[list[float | None]] | None = None
    # In a rollout with tools, the messages of each completion, with the media of results
    completions: list[list[dict[str, Any]]] | None = None
    tool_mask: Any = None  # 1 on tokens that were sampled, where TRL's trainer doesn't know of others
    # In a rollout, what `rollout_func` says beside completions, where TRL's trainer doesn't take it
    extra: dict[str, Any] | None = None
    rewards_per_func: Any = None  # in a rollout, the rewards of all processes' completions, `(N, F)`
    # Scores of the completions, in the order in which they were computed
    scores: list[Scores] = field(default_factory=list)
    supervised: Completions | None = None  # in a loss of PPO, prompts, supervised completions and their mask
