# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Qwen2.5-Omni with a server that holds the whole model: the trainer's thinker, and rows with media of all kinds."""

from pathlib import Path

import transformers as hf
from datasets import Dataset
from helpers.chats import image, video
from helpers.trainer_utils import sound


def load_omni(folder: Path) -> dict:
    """Returns the arguments `model` and `processing_class` of a trainer."""
    model = hf.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype="float32")
    return {"model": model, "processing_class": hf.AutoProcessor.from_pretrained(folder)}


def omni_rows() -> Dataset:
    """Returns four rows: one sound; no media; two sounds with an image and a video; one image."""
    prompts = ["What do you hear?", "Is there a cat?", "Compare them.", "What is in the image?"]
    media = {
        "audios": [[sound(0.4)], [], [sound(0.3, 1), sound(0.6, 2)], []],
        "images": [[], [], [image(84, 56)["image"]], [image(56, 56, 3)["image"]]],
        "videos": [[], [], [video(4, 56, 56)["video"]], []],
    }
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each}], "index": i} for i, each in enumerate(prompts)]
    )
    return rows.with_transform(
        lambda batch: {**batch, **{kind: [own[i] for i in batch["index"]] for kind, own in media.items()}}
    )
