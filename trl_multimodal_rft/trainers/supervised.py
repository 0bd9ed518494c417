# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a supervised dataset as prompts and completions that a policy can score."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..media.columns import rows_to_messages
from ..media.encoding import EncodedPrompt, encode_prompt


def encode_supervised(
    rows: list[dict[str, Any]],
    processing_class: ProcessorMixin | PreTrainedTokenizerBase,
    model: PreTrainedModel,
    end_ids: list[int],
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: str = "raise",
) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor]:
    """
    Encodes prompts with their media, and the completions that are to be learned.

    Args:
        rows (`list[dict]`):
            Rows with `prompt` and `completion` (both text or both messages), or with `messages`, whose last one, the
            assistant's, is the completion; and media columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The policy's processor.
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped policy.
        end_ids (`list[int]`):
            Tokens that end a completion. It goes to the first of them, or gets the first of this list.
        template_kwargs (`dict`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            See [`encode_prompt`].

    Returns:
        `tuple`: The prompts, length `B`, the completions' ids padded on the right, `(B, C)`, and their mask.

    Raises:
        `ValueError`: If a row has no completion, or if the chat template writes the prompt otherwise when an answer follows.
        [`MediaError`]: If a medium can't be decoded or doesn't match its placeholder.
    """
    split = [_split(row, index) for index, row in enumerate(rows)]
    prompts = [row["prompt"] for row in rows_to_messages([prompt for prompt, _ in split])]
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    encoded, completions = [], []
    for index, (prompt, (_, completion)) in enumerate(zip(prompts, split, strict=True)):
        encoded.append(
            encode_prompt(
                prompt, processing_class, model, template_kwargs=template_kwargs, audio_overlong=audio_overlong
            )
        )
        text = completion
        if not isinstance(prompt, str):
            answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
            text = _answer_text(prompt, answer, processing_class, template_kwargs or {}, index)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [place for place, token in enumerate(ids) if token in end_ids]
        completions.append(torch.tensor(ids[: ends[0] + 1] if ends else [*ids, end_ids[0]]))
    ids = pad_sequence(completions, batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in completions], batch_first=True)
    return encoded, ids, mask


def _split(row: dict[str, Any], index: int) -> tuple[dict[str, Any], Any]:
    """The row with the prompt alone, and the completion."""
    if "messages" in row:
        *prompt, answer = row["messages"]
        if answer["role"] != "assistant" or not prompt:
            raise ValueError(f"row {index}, column 'messages': the last message must be the assistant's answer.")
        return {**row, "prompt": prompt}, [answer]
    if row.get("completion") is None or row.get("prompt") is None:
        raise ValueError(
            f"row {index} of `ptx_dataset` has {sorted(row)}; it needs `prompt` and `completion`, or `messages`."
        )
    return row, row["completion"]


def _answer_text(prompt: list, answer: list, processing_class, template_kwargs: dict, index: int) -> str:
    answer = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(prompt[-1]["content"], list) and isinstance(message["content"], str)
        else message
        for message in answer
    ]
    before = processing_class.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **template_kwargs
    )
    whole = processing_class.apply_chat_template([*prompt, *answer], tokenize=False, **template_kwargs)
    if not whole.startswith(before):
        raise ValueError(
            f"row {index} of `ptx_dataset`: the chat template writes the prompt otherwise when an answer follows, so that "
            "the answer can't be told from it; pass a `chat_template` that doesn't."
        )
    return whole.removeprefix(before)
