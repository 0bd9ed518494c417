# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Tiny models, made-up rows and settings with which a CPU runs the notebooks that need a GPU.

A function of a notebook's name prepares a folder and returns values for the notebook's parameters.
"""

from pathlib import Path
from typing import Any

from datasets import Audio, Dataset

from helpers.chats import RATE, audio, image
from helpers.four_bits import save_wide
from helpers.trainer_utils import saved


CATEGORIES = ["dog", "chirping_birds", "vacuum_cleaner", "sea_waves", "clock_tick"]


def qwen2_audio_lora(folder: Path) -> dict[str, Any]:
    """A tiny Qwen2-Audio, and twenty chirps in the columns of ESC-50."""
    rows = {
        "audio": [{"array": audio(0.3 + 0.02 * i, i)["audio"], "sampling_rate": RATE} for i in range(20)],
        "category": [CATEGORIES[i % 5] for i in range(20)],
        "fold": [1 + i // 4 for i in range(20)],
    }
    dataset = Dataset.from_dict(rows).cast_column("audio", Audio(sampling_rate=RATE))
    dataset.to_parquet(folder / "data" / "train.parquet")
    paths = {"model_id": str(saved("qwen2_audio")), "dataset_id": str(folder / "data")}
    sizes = {"num_generations": 4, "prompts_per_update": 2, "max_completion_length": 8}
    run = {"max_steps": 2, "eval_steps": 1, "output_dir": str(folder / "trained"), "learning_rate": 1e-2}
    return {**paths, **sizes, **run, "dtype": "float32"}


def qwen2_5_vl_t4(folder: Path) -> dict[str, Any]:
    """A small Qwen2.5-VL, wide enough for 4 bits, and pictures in the columns of Geometry3K."""
    save_wide("qwen2_5_vl", folder / "model")
    pictures = [image(84, 56, seed)["image"] for seed in range(8)]
    rows = [{"images": [each], "problem": "<image>Find x.", "answer": str(i)} for i, each in enumerate(pictures)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}.parquet")
    paths = {"model_id": str(folder / "model"), "dataset_id": str(folder / "data")}
    sizes = {"num_generations": 4, "max_completion_length": 8, "max_pixels": 56 * 56, "test_rows": 5}
    run = {"max_steps": 2, "eval_steps": 1, "output_dir": str(folder / "trained"), "learning_rate": 1e-2}
    return {**paths, **sizes, **run, "fp16": False}
