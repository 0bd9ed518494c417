# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Draws README's picture of answers before and after training, in the folder of its twelve lines.

```bash
for model in model digits; do
    trl-multimodal-rft evaluate --model_name_or_path $model --dataset_name test.csv --media_dir recordings \\
        --prompt "Which digit is spoken?" --reward_funcs accuracy_reward --max_completion_length 3 \\
        --output_dir answers-$model
done
python PATH/TO/CLONE/docs/draw_answers.py recordings test.csv answers-model answers-digits
```

The recordings are the first of three digits, whatever the answers to them.
"""

import csv
import html
import sys
from pathlib import Path

import numpy as np
import pandas
import soundfile


PICTURE = Path(__file__).parent / "images" / "before_after.svg"
SHOWN = ("seven", "two", "nine")
GREY = "#7d8590"
BLUE = "#5b7fb5"
RED = "#c8553d"
GREEN = "#3f9b63"
ROW = 52  # pixels
WIDTH = 640
BARS = 60  # of a waveform


def waveform(samples: np.ndarray, left: float, middle: float, width: float, height: float) -> str:
    """Returns bars as high as the loudest sample of each part of a recording."""
    parts = [np.abs(part).max() for part in np.array_split(samples, BARS)]
    heights = np.maximum(np.array(parts) / max(parts) * height, 2)
    step = width / BARS
    return "\n".join(
        f'<rect x="{left + i * step:.1f}" y="{middle - each / 2:.1f}" width="{step * 0.6:.1f}" height="{each:.1f}" '
        f'fill="{BLUE}"/>'
        for i, each in enumerate(heights)
    )


def words(x: float, y: float, text: str, color: str = GREY, weight: int = 400) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-weight="{weight}">{html.escape(text)}</text>'


def answer(x: float, y: float, text: str, expected: str) -> str:
    """Returns an answer with its mark."""
    is_right = text.strip() == expected
    return words(x, y, f"“{text}” {'✓' if is_right else '✗'}", GREEN if is_right else RED, 600)


def picture(rows: list[tuple[np.ndarray, str, str, str]]) -> str:
    """Returns the drawing of recordings, each with its digit and the answers before and after training, as SVG."""
    height = ROW * (len(rows) + 1)
    label = "; ".join(f"{digit}: {before} before training, {after} after" for _, digit, before, after in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="15" role="img" aria-label="{html.escape(label)}">',
        words(20, 30, "Which digit is spoken?"),
        words(280, 30, "before training"),
        words(470, 30, "after 100 updates"),
    ]
    for i, (samples, digit, before, after) in enumerate(rows):
        middle = ROW * (i + 1) + 16
        parts.append(waveform(samples, 20, middle, 220, 36))
        parts.append(answer(280, middle + 5, before, digit))
        parts.append(answer(470, middle + 5, after, digit))
    return "\n".join([*parts, "</svg>\n"])


def main(recordings: str, table: str, before: str, after: str) -> None:
    with open(table, newline="") as file:
        names = list(csv.DictReader(file))
    answers = [pandas.read_parquet(Path(folder, "rows.parquet")) for folder in (before, after)]
    rows = []
    for digit in SHOWN:
        index = next(i for i, row in enumerate(names) if row["solution"] == digit)
        samples, _ = soundfile.read(Path(recordings, names[index]["audio"]))
        texts = [text_of(each.iloc[index]) for each in answers]
        rows.append((samples, digit, *texts))
    PICTURE.write_text(picture(rows))


def text_of(row: pandas.Series) -> str:
    """Returns the completion of a row that `evaluate` wrote."""
    completion = row["completions"][0]
    return completion if isinstance(completion, str) else completion[-1]["content"]


if __name__ == "__main__":
    main(*sys.argv[1:])
