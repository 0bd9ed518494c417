# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Chats as the package encodes them."""

import transformers as hf

from trl_multimodal_rft.data.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, encode_prompt

from .families import RATE


def encode_chats(
    model: hf.PreTrainedModel, processor: hf.ProcessorMixin, chats: list[list[dict]]
) -> list[EncodedPrompt]:
    """Prompts of chats with one message each."""
    for chat in chats:
        for block in chat[0]["content"]:
            if block["type"] == "audio":
                block["sampling_rate"] = RATE
    rows = rows_to_messages([{"prompt": chat} for chat in chats])
    return [encode_prompt(row["prompt"], processor, model) for row in rows]
