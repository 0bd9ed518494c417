# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions that nobody can answer, among others: what a critic is there to tell apart."""

import io

import numpy as np
from datasets import Dataset, Value
from PIL import Image as PILImage


def with_noise(dataset: Dataset, every: int = 4) -> Dataset:
    """
    Puts white noise in the place of some recordings or pictures, as long or as large as they are.

    There nothing is left but to guess, so the reward to expect depends on the row, and only who listens or looks knows
    it.

    Args:
        dataset ([`~datasets.Dataset`]):
            Split of [`~tasks.spoken_digits`] or of [`~tasks.handwritten_digits`], where each ten rows have ten
            answers.
        every (`int`, *optional*, defaults to `4`):
            The first ten rows of so many times ten become noise, so that each answer is as often lost.

    Returns:
        [`~datasets.Dataset`]: The dataset with the same columns.
    """
    makers = {"audio": _noise_like_recording, "image": _noise_like_picture}
    (column,) = makers.keys() & set(dataset.column_names)
    encoded = dataset.cast_column(column, {"bytes": Value("binary"), "path": Value("string")})[column]
    rng = np.random.default_rng(0)
    media = [
        {"bytes": makers[column](medium, rng), "path": None} if row // 10 % every == 0 else medium
        for row, medium in enumerate(encoded)
    ]
    return dataset.remove_columns(column).add_column(column, media).cast_column(column, dataset.features[column])


def _noise_like_recording(medium: dict, rng: np.random.Generator) -> bytes:
    import soundfile

    like, file = soundfile.info(medium["path"]), io.BytesIO()
    soundfile.write(file, rng.normal(scale=0.1, size=like.frames), like.samplerate, format="WAV")
    return file.getvalue()


def _noise_like_picture(medium: dict, rng: np.random.Generator) -> bytes:
    like, file = PILImage.open(io.BytesIO(medium["bytes"])), io.BytesIO()
    pixels = rng.integers(256, size=(like.height, like.width), dtype=np.uint8)
    PILImage.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
