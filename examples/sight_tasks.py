# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions about pictures of shapes, from the Python package `easy-vqa`."""

import random

from datasets import Dataset, DatasetDict, Image


INSTALL = "pip install --no-deps easy-vqa==1.0"
SHAPES = ("circle", "rectangle", "triangle")
BINARY = ("yes", "no")


def pictured_shapes(train_rows: int = 4000, test_rows: int = 400, seed: int = 0) -> DatasetDict:
    """
    Questions about the shape and the colour in a picture, with thirteen answers of one word.

    Both splits are drawn from those of easy-VQA, so that no picture is in both. Half of the rows ask for yes or no,
    such as "is there not a red shape?", and a quarter each for a shape and a colour; the column `kind` says which.

    Args:
        train_rows (`int`, *optional*, defaults to `4000`):
            Rows of the split `train`, at most 20,000.
        test_rows (`int`, *optional*, defaults to `400`):
            Rows of the split `test`, at most 5,000.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the drawn questions and their order.

    Raises:
        `ImportError`: If `easy-vqa` is missing.
    """
    try:
        import easy_vqa
    except ImportError as error:
        raise ImportError(f"`easy_vqa` is missing, which has the pictures: run `{INSTALL}`.") from error
    splits = {
        "train": _drawn(easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths(), train_rows, seed),
        "test": _drawn(easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths(), test_rows, seed),
    }
    return DatasetDict(splits)


def kind(answer: str) -> str:
    """Returns what a question with this answer asks for."""
    if answer in BINARY:
        return "yes or no"
    return "shape" if answer in SHAPES else "colour"


def _drawn(parts: tuple[list, list, list], paths: dict[int, str], n: int, seed: int) -> Dataset:
    every = list(zip(*parts, strict=True))  # question, answer and the picture's number
    rng = random.Random(seed)
    rng.shuffle(every)
    wanted = {"yes or no": n // 2, "shape": n // 4, "colour": n - n // 2 - n // 4}
    chosen = []
    for name, n_rows in wanted.items():
        chosen += [row for row in every if kind(row[1]) == name][:n_rows]
    rng.shuffle(chosen)
    columns = {
        "prompt": [[{"role": "user", "content": question}] for question, _, _ in chosen],
        "image": [paths[number] for _, _, number in chosen],
        "solution": [answer for _, answer, _ in chosen],
        "kind": [kind(answer) for _, answer, _ in chosen],
    }
    return Dataset.from_dict(columns).cast_column("image", Image())
