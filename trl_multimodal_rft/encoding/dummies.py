# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts with minimal media, for encoders that must run on ranks without media."""

import numpy as np
import PIL.Image
from transformers import PreTrainedModel

from ..data.rows.columns import rows_to_messages
from .processors import Processor
from .prompts import EncodedPrompt, encode_prompt


_SIDE = 56  # pixels
_VIDEO_SIDE = 224  # a multiple of the patch sizes of all families, since frames aren't resized
_RATE = 16000  # Hz
_MEDIA = {
    "image": lambda: PIL.Image.new("RGB", (_SIDE, _SIDE), "gray"),
    "video": lambda: np.full((4, _VIDEO_SIDE, _VIDEO_SIDE, 3), 128, dtype=np.uint8),
    "audio": lambda: {"array": np.full(_RATE // 4, 0.01, dtype=np.float32), "sampling_rate": _RATE},
}


class DummyPrompt(EncodedPrompt):
    """A dummy prompt that keeps every rank's encoders in the collectives and has no tokens in the loss."""


def dummy_prompt(modality: str | None, processor: Processor, model: PreTrainedModel) -> DummyPrompt:
    """
    Returns a prompt with one small image, video or sound, or without media. As it has no completion, it doesn't affect
    the other prompts of a batch, and the encoder of its modality gets a gradient of exactly 0.
    """
    (row,) = rows_to_messages([{"prompt": "-", **({} if modality is None else {modality: _MEDIA[modality]()})}])
    return DummyPrompt(**vars(encode_prompt(row["prompt"], processor, model)))
