# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts of chats as the package encodes them, and plain forward passes of their completions."""

import functools

import torch
import transformers as hf

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, encode_prompt

from .chats import RATE
from .families import ALL_FAMILIES, fresh


@functools.cache
def _encoder(name: str):
    def build():
        model, processor = ALL_FAMILIES[name].build()
        return model, processor, encode_chats(model, processor, ALL_FAMILIES[name].prompts())

    return build


def build_encoded(name: str) -> tuple[hf.PreTrainedModel, hf.ProcessorMixin, list[EncodedPrompt]]:
    """Returns a fresh model of a family, its processor and its encoded prompts."""
    return fresh(_encoder(name))


def encode_chats(
    model: hf.PreTrainedModel, processor: hf.ProcessorMixin, chats: list[list[dict]]
) -> list[EncodedPrompt]:
    """Returns the encoded prompts of chats, each with one message."""
    for chat in chats:
        for block in chat[0]["content"]:
            if block["type"] == "audio":
                block["sampling_rate"] = RATE
    rows = rows_to_messages([{"prompt": chat} for chat in chats])
    return [encode_prompt(row["prompt"], processor, model) for row in rows]


def assert_same_features(prompt, expected):
    """Asserts that a prompt holds the processor's output."""
    assert torch.equal(prompt.input_ids, expected["input_ids"][0])
    for key in expected.keys() - {"input_ids", "attention_mask", "labels"}:
        got = prompt.token_fields[key][None] if key in prompt.token_fields else prompt.media.get(key)
        if "second_per_grid" in key:  # frames in an array have no known rate
            continue
        # A prompt without media may lack outputs that the processor has for all prompts
        assert got is None if not prompt.modalities and got is None else torch.equal(got, expected[key]), key


def extended(inputs, ids: torch.Tensor, **fill) -> dict:
    """Returns a prompt's inputs with a completion appended. The completion's token fields are 0, or as in `fill`."""
    shape = inputs["input_ids"].shape
    fill = {"attention_mask": 1, **fill}
    per_token = {name: value for name, value in inputs.items() if value.shape == shape}
    padded = {
        name: torch.nn.functional.pad(v, (0, len(ids)), value=fill.get(name, 0)) for name, v in per_token.items()
    }
    return {**inputs, **padded, "input_ids": torch.cat([inputs["input_ids"], ids[None]], dim=1)}


def own_logps(model, inputs, ids: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities `(len(ids),)` of a completion, by the model's plain forward pass."""
    with torch.no_grad():
        logits = model(**extended(inputs, ids)).logits[0, -len(ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
