# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""IntentTrain, questions about people in videos, whose rows become those of Video-R1."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from .layouts import OPTIONS_TEMPLATE, load_video_r1
from .load import read_json, required


def load_intent_train(
    path: str | Path,
    split: str = "train",
    *,
    template: str = OPTIONS_TEMPLATE,
    nframes: int | None = None,
    max_pixels: int | None = None,
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads IntentTrain of [HumanOmniV2](https://huggingface.co/papers/2506.21277), questions about videos and what is
    said in them.

    The layout is that of a list of https://huggingface.co/datasets/PhilipC/IntentTrain, as NeMo RL reads it: entries
    have `problem`, `options`, `answer`, `problem_type`, and `video` or `path`. Of them, the multiple-choice ones about
    videos are kept.

    See [`load_conversations`] for the other arguments and the errors.

    Args:
        template (`str`, *optional*):
            Prompt, with `{problem}` and `{options}`, one in each line.
        nframes, max_pixels (`int`, *optional*):
            Frames of each video, and most pixels of each, by default the choice of the processor.

    Returns:
        [`~datasets.Dataset`]: Rows as those of [`load_video_r1`].

    Example:
    ```python
    dataset = load_intent_train("IntentTrain/social_iq_v2_rewrite.json", media_dir="IntentTrain/videos")
    ```
    """

    def read(file: Path) -> list[dict[str, Any]]:
        rows = [row for row in read_json(file) if row.get("problem_type") == "multiple choice"]
        rows = [row for row in rows if row.get("data_type", "video") == "video"]
        if not rows:
            raise ValueError(f"{file} has no rows with the problem type 'multiple choice' about videos.")
        kept = ("problem", "options", "problem_type", "problem_id", "data_source")
        return [
            {
                **{name: row.get(name) for name in kept},
                "data_type": "video",
                "path": required(row, index, "video", "path"),
                "solution": required(row, index, "answer", "solution"),
            }
            for index, row in enumerate(rows)
        ]

    options = {"template": template, "nframes": nframes, "max_pixels": max_pixels, "media_dir": media_dir}
    return load_video_r1(path, split, **options, read=read)
