# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions that nobody can answer, among others: what a critic is there to tell apart."""

import io

import numpy as np
from datasets import Dataset, Value
from PIL import Image as PILImage


def with_noise(dataset: Dataset, every: int = 4) -> Dataset:
    """
    Makes noise of some recordings or pictures: their samples or pixels in random order.

    It is as loud or as bright as what it was, but there nothing is left but to guess. So the reward to expect depends on
    the row, and only who listens or looks knows it.

    Args:
        dataset ([`~datasets.Dataset`]):
            Split of [`~tasks.spoken_digits`] or of [`~tasks.handwritten_digits`], where each ten rows have ten answers.
        every (`int`, *optional*, defaults to `4`):
            The first ten rows of so many times ten become noise, so that each answer is as often lost.

    Returns:
        [`~datasets.Dataset`]: The dataset with the same columns.
    """
    shufflers = {"audio": _shuffle_samples, "image": _shuffle_pixels}
    (column,) = shufflers.keys() & set(dataset.column_names)
    encoded = dataset.cast_column(column, {"bytes": Value("binary"), "path": Value("string")})[column]
    rng = np.random.default_rng(0)
    media = [
        {"bytes": shufflers[column](medium, rng), "path": None} if row // 10 % every == 0 else medium
        for row, medium in enumerate(encoded)
    ]
    return dataset.remove_columns(column).add_column(column, media).cast_column(column, dataset.features[column])


def _shuffle_samples(medium: dict, rng: np.random.Generator) -> bytes:
    import soundfile

    samples, rate = soundfile.read(medium["path"])
    soundfile.write(file := io.BytesIO(), rng.permutation(samples), rate, format="WAV")
    return file.getvalue()


def _shuffle_pixels(medium: dict, rng: np.random.Generator) -> bytes:
    pixels = np.asarray(PILImage.open(io.BytesIO(medium["bytes"])))
    PILImage.fromarray(rng.permuted(pixels.reshape(-1)).reshape(pixels.shape)).save(file := io.BytesIO(), format="PNG")
    return file.getvalue()
