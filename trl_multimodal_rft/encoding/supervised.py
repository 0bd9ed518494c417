# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a supervised dataset as prompts and completions that a policy can score."""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..data.columns import iter_refs, rows_to_messages
from ..data.rules import DEFAULT_RULES, MediaRules
from .prompts import EncodedPrompt, all_placeholder_ids, encode_prompt


def encode_supervised(
    rows: list[dict[str, Any]],
    processing_class: ProcessorMixin | PreTrainedTokenizerBase,
    model: PreTrainedModel,
    end_ids: list[int],
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    ignored_media_columns: Collection[str] = (),
    media_rules: MediaRules = DEFAULT_RULES,
) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor]:
    """
    Encodes prompts with their media, and the completions that are to be learned.

    Args:
        rows (`list[dict]`):
            Rows with `prompt` and `completion`, or with `messages`, whose last one, the assistant's, is the
            completion; and media columns. A prompt and a completion that are both text, without media, are taken as
            they are; all others are written by the chat template.
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
        ignored_media_columns (`Collection[str]`, *optional*, defaults to `()`):
            Media columns that are not for the prompt.
        media_rules ([`~data.rules.MediaRules`], *optional*):
            From where media may come, and how large they may be.

    Returns:
        `tuple`: The prompts, length `B`, the completions' ids padded on the right, `(B, C)`, and their mask.

    Raises:
        `ValueError`: If a row has no completion, if that isn't the assistant's or holds media, or if the chat template
            can't write it after the prompt.
        [`MediaError`]: If a medium can't be decoded or doesn't match its placeholder.
    """
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    placeholders = all_placeholder_ids(model, processing_class)
    chats = [_chat(row, index) for index, row in enumerate(rows)]
    placed = rows_to_messages(
        [{**row, "prompt": [*chat, *completion]} for row, (chat, completion) in zip(rows, chats, strict=True)],
        ignored_media_columns,
        rules=media_rules,
    )
    encoded, completions = [], []
    for index, (row, (chat, completion)) in enumerate(zip(rows, chats, strict=True)):
        messages = placed[index]["prompt"]
        prompt, completion = messages[: len(chat)], messages[len(chat) :]
        medium = next(iter_refs(completion), None)
        if medium is not None:
            raise medium.error("a completion is text; put media into the messages before it")
        if _is_text(row) and next(iter_refs(prompt), None) is None:
            prompt, before, whole = row["prompt"], row["prompt"], row["prompt"] + row["completion"]
        else:
            before, whole = _written(prompt, completion, processing_class, template_kwargs or {}, index)
        encoded.append(
            encode_prompt(
                prompt,
                processing_class,
                model,
                template_kwargs=template_kwargs,
                audio_overlong=audio_overlong,
                row=index,
            )
        )
        ids = _ids_after(before, whole, tokenizer)
        if not placeholders.isdisjoint(ids):
            found = tokenizer.convert_ids_to_tokens(next(i for i in ids if i in placeholders))
            raise ValueError(f"row {index} of `ptx_dataset`: the completion holds {found!r}, which stands for media.")
        ends = [place for place, token in enumerate(ids) if token in end_ids]
        completions.append(torch.tensor(ids[: ends[0] + 1] if ends else [*ids, end_ids[0]]))
    padded = pad_sequence(completions, batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in completions], batch_first=True)
    return encoded, padded, mask


def _is_text(row: dict[str, Any]) -> bool:
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _chat(row: dict[str, Any], index: int) -> tuple[list, list]:
    """The messages of the prompt, and those of the completion."""
    prompt, completion, column = row.get("prompt"), row.get("completion"), "completion"
    if row.get("messages"):
        (*prompt, last), column = row["messages"], "messages"
        completion = [last]
    if not prompt or not completion:
        raise ValueError(
            f"row {index} of `ptx_dataset` has {sorted(key for key in row if row[key] is not None)}; it needs "
            "`prompt` and `completion`, or `messages` with the assistant's answer at the end."
        )
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if completion[0]["role"] != "assistant":
        raise ValueError(
            f"row {index}, column '{column}': the answer to learn must be the assistant's, got one of "
            f"{completion[0]['role']!r}."
        )
    return prompt, completion


def _written(prompt: list, completion: list, processing_class, template_kwargs: dict, index: int) -> tuple[str, str]:
    """What the chat template writes, without the completion and with it."""
    if processing_class.chat_template is None and template_kwargs.get("chat_template") is None:
        raise ValueError(
            f"row {index} of `ptx_dataset`: {type(processing_class).__name__} has no chat template that could write "
            "an answer; pass one as `chat_template`."
        )
    before = processing_class.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **template_kwargs
    )
    whole = processing_class.apply_chat_template([*prompt, *completion], tokenize=False, **template_kwargs)
    if not whole.startswith(before):
        raise ValueError(
            f"row {index} of `ptx_dataset`: the chat template writes the prompt otherwise when an answer follows, so "
            "that the answer can't be told from it; pass a `chat_template` that doesn't."
        )
    return before, whole


def _ids_after(before: str, whole: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of what `whole` has after `before`."""
    first, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, whole))
    if both[: len(first)] == first:
        return both[len(first) :]  # some tokenizers mark the start of a text, which this isn't
    # A token would reach over the border, which no sampled completion does
    return tokenizer(whole.removeprefix(before), add_special_tokens=False)["input_ids"]
