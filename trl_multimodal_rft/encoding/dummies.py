# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts with the smallest media there are, for encoders that must run where there are none."""

import numpy as np
import PIL.Image
from transformers import PreTrainedModel, ProcessorMixin

from ..data.columns import rows_to_messages
from .prompts import EncodedPrompt, encode_prompt


_SIDE = 56  # pixels
_VIDEO_SIDE = 224  # a multiple of the patches of all families, which don't resize given frames
_RATE = 16000
_MEDIA = {
    "image": lambda: PIL.Image.new("RGB", (_SIDE, _SIDE), "gray"),
    "video": lambda: np.full((4, _VIDEO_SIDE, _VIDEO_SIDE, 3), 128, dtype=np.uint8),
    "audio": lambda: {"array": np.full(_RATE // 4, 0.01, dtype=np.float32), "sampling_rate": _RATE},
}


class DummyPrompt(EncodedPrompt):
    """A prompt beside others that stands for none of the data, so that no loss counts its tokens."""


def dummy_prompt(kind: str, processor: ProcessorMixin, model: PreTrainedModel) -> DummyPrompt:
    """
    A prompt with one small medium.

    In a batch beside others, without a completion, it changes nothing for them, and gives the encoder of its kind a
    gradient that is exactly 0.
    """
    (row,) = rows_to_messages([{"prompt": "-", kind: _MEDIA[kind]()}])
    return DummyPrompt(**vars(encode_prompt(row["prompt"], processor, model)))
