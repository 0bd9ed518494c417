# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes the files of `docs/first_run.md` into the working directory: media, their answers, and small models.

The recordings are spoken digits, the pictures written ones, and the models have random weights. Only the agent's has
seen calls of its tool.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
from datasets import Dataset
from small_models import VisionModel, digit_model, hidden_digit_model, spoken_digit_model, tool_call
from tasks import DIGITS, HIDDEN_QUESTION, handwritten_digits, hidden_digits, spoken_digits

from trl_multimodal_rft import MultimodalSFTConfig, MultimodalSFTTrainer


SIDE = 28  # pixels of a quarter, and of a small picture


def write_table(path: str, *rows: Iterable[str]) -> None:
    """Writes rows, the first of which names the columns."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_pictures(folder: str, column: str, rows: Dataset) -> None:
    """Writes the images of rows into a folder, and a table of their names, in a column, and solutions."""
    Path(folder).mkdir()
    for number, row in enumerate(rows):
        row["image"].save(Path(folder, f"{number}.png"))
    answers = [(f"{number}.png", row["solution"]) for number, row in enumerate(rows)]
    write_table(f"{folder}.csv", (column, "solution"), *answers)


def pairs(answers: dict[str, str], seed: int) -> list[tuple[str, str, str]]:
    """Returns names of recordings, each with a right answer and with one that is wrong, or that doesn't end."""
    rng = np.random.default_rng(seed)
    rows = []
    for name, chosen in answers.items():
        other = str(rng.choice([digit for digit in DIGITS if digit != chosen]))
        rows.append((name, chosen, f"{chosen} {other}" if rng.random() < 0.3 else other))
    return rows


def labelled(pairs: list[tuple[str, str, str]], seed: int) -> list[tuple[str, str, str]]:
    """Returns names of recordings, each with one of its two answers, drawn at random, and whether it is right."""
    is_right = np.random.default_rng(seed).random(len(pairs)) < 0.5
    return [
        (name, chosen, "true") if right else (name, rejected, "false")
        for (name, chosen, rejected), right in zip(pairs, is_right, strict=True)
    ]


def looks(pictures: Dataset) -> list[dict]:
    """Returns the turns of an agent that looks at the quarter with the digit and reads it, each with its context."""
    turns = []
    shown = {"type": "image", "text": None}
    for row in pictures:
        picture = row["image"]
        question = {"type": "text", "text": HIDDEN_QUESTION}
        y, x = (int(where.min() >= SIDE) for where in np.asarray(picture).nonzero())
        quarter = picture.crop((SIDE * x, SIDE * y, SIDE * (x + 1), SIDE * (y + 1)))
        call = {"role": "assistant", "content": [{"type": "text", "text": tool_call("zoom", x=x, y=y)}]}
        first = [{"role": "user", "content": [question, shown]}]
        then = [{"role": "user", "content": [question]}, call, {"role": "tool", "content": [shown]}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": row["solution"]}]}
        turns.append({"prompt": first, "completion": [call], "images": [picture.resize((SIDE, SIDE))]})
        turns.append({"prompt": then, "completion": [answer], "images": [quarter]})
    return turns


def looking_model(pictures: Dataset) -> VisionModel:
    """Returns a model that calls `zoom(x, y)` before it answers, mostly wrongly."""
    model, processor = hidden_digit_model()
    args = MultimodalSFTConfig(
        "looking",
        per_device_train_batch_size=20,
        learning_rate=2e-3,
        max_steps=40,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    rows = Dataset.from_list(looks(pictures))
    MultimodalSFTTrainer(model=model, args=args, train_dataset=rows, processing_class=processor).train()
    return model, processor


def main() -> None:
    Path("recordings").mkdir()
    for split, rows in spoken_digits().items():
        answers = {}
        for number, row in enumerate(rows):
            samples, rate = soundfile.read(row["audio"]["path"])
            name = f"{split}_{number}.wav"
            soundfile.write(Path("recordings", name), samples, rate)
            answers[name] = row["solution"]
        write_table(f"{split}.csv", ("audio", "solution"), *answers.items())
        compared = pairs(answers, seed=len(answers))
        write_table(f"{split}_pairs.csv", ("audio", "chosen", "rejected"), *compared)
        write_table(f"{split}_labelled.csv", ("audio", "completion", "label"), *labelled(compared, seed=len(answers)))
    write_pictures("pictures", "image", handwritten_digits()["train"].select(range(480)))
    pictures = hidden_digits()["train"].select(range(480))
    write_pictures("hidden", "picture", pictures)
    models = {
        "model": spoken_digit_model(),
        "seeing": digit_model(),
        "looking": looking_model(pictures.select(range(200))),
    }
    for folder, parts in models.items():
        for part in parts:
            part.save_pretrained(folder)


if __name__ == "__main__":
    main()
