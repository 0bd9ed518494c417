# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes what `docs/first_run.md` starts from, into the working directory: media, their answers, and small models.

The recordings are spoken digits, the pictures written ones, and the models have random weights.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

import soundfile
from small_models import digit_model, spoken_digit_model
from tasks import handwritten_digits, spoken_digits


def write_table(path: str, column: str, rows: Iterable[tuple[str, str]]) -> None:
    """Writes names of files with their answers."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([(column, "solution"), *rows])


def main() -> None:
    Path("recordings").mkdir()
    for split, rows in spoken_digits().items():
        answers = {}
        for number, row in enumerate(rows):
            samples, rate = soundfile.read(row["audio"]["path"])
            name = f"{split}_{number}.wav"
            soundfile.write(Path("recordings", name), samples, rate)
            answers[name] = row["solution"]
        write_table(f"{split}.csv", "audio", answers.items())
    Path("pictures").mkdir()
    digits = handwritten_digits()["train"].select(range(480))
    for number, row in enumerate(digits):
        row["image"].save(Path("pictures", f"{number}.png"))
    write_table("pictures.csv", "image", [(f"{number}.png", row["solution"]) for number, row in enumerate(digits)])
    for folder, make in (("model", spoken_digit_model), ("seeing", digit_model)):
        for part in make():
            part.save_pretrained(folder)


if __name__ == "__main__":
    main()
