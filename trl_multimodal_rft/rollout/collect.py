# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What completions and prompts are made of that come as lists of ids."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..encoding.prompts import EncodedPrompt


def right_pad(rows: Sequence[Sequence], value: float, multiple: int | None = None) -> torch.Tensor:
    """Lists of numbers as a tensor `(N, C)`, padded on the right, to a multiple as TRL's `pad_to_multiple_of`."""
    longest = max(map(len, rows))
    if multiple:
        longest += -longest % multiple
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def text_prompt(ids: Sequence[int]) -> EncodedPrompt:
    """A prompt of text that the user's code tokenized."""
    input_ids = torch.tensor(ids, dtype=torch.long)
    return EncodedPrompt(input_ids, {}, {}, torch.arange(len(input_ids))[None])


def check_rollout(output: dict[str, Any], prompts: Sequence[EncodedPrompt], placeholders: Collection[int]) -> None:
    """
    Checks what `rollout_func` returned for prompts with media.

    Raises `ValueError` if it tokenized a prompt differently, or sampled placeholders.
    """
    rows = zip(prompts, output["prompt_ids"], output["completion_ids"], strict=True)
    for i, (prompt, given, ids) in enumerate(rows):
        if list(given) != prompt.input_ids.tolist():
            raise ValueError(
                f"`rollout_func` gave {len(given)} `prompt_ids` for completion {i}, not the {len(prompt)} "
                "of its prompt as the processor encodes it, placeholders of media and all; return those of "
                "`trainer.processing_class.apply_chat_template(..., tokenize=True, return_dict=True)`."
            )
        if not set(placeholders).isdisjoint(ids):
            raise ValueError(
                f"`rollout_func` gave placeholders of media in `completion_ids` of completion {i}, whose media "
                "nothing knows; use `tools` or `environment_factory` to show media to the model."
            )
