# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions about pictures of shapes, from the Python package `easy-vqa`."""

import random
from collections import Counter

from datasets import Dataset, DatasetDict, Image


INSTALL = "pip install --no-deps easy-vqa==1.0"
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
BINARY = ("yes", "no")
# Kinds of questions for a word, and answers to questions for yes or no, each with whether the question is negated
_CELLS = (
    ("shape", False),
    ("yes", False),
    ("colour", False),
    ("no", True),
    ("shape", False),
    ("no", False),
    ("colour", False),
    ("yes", True),
)

Row = tuple[str, str, int]


def pictured_shapes(train_rows: int = 4000, test_rows: int = 400, seed: int = 0) -> DatasetDict:
    """
    Questions about the shape and the colour in a picture, with thirteen answers of one word.

    Both splits are drawn from those of easy-VQA, so that no picture is in both. Half of the rows ask for yes or no,
    such as "is there not a red shape?", and a quarter each for a shape and a colour; the column `kind` says which.
    "Yes" and "no" are right equally often, with and without a negation, so that the wording of a question says nothing
    about its answer. In the train split, the column `caption` says what is in the picture, such as "blue circle.", and
    the column `described` is an answer that begins with it, such as "blue circle. blue is not red. Answer: yes".
    Pictures of which easy-VQA doesn't say shape and colour are left out there.

    Args:
        train_rows (`int`, *optional*, defaults to `4000`):
            Rows of the split `train`, at most 10,000.
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
    asked = list(zip(*easy_vqa.get_train_questions(), strict=True))  # question, answer and the picture's number
    shapes = {number: answer for _, answer, number in asked if kind(answer) == "shape"}
    colours = {number: answer for _, answer, number in asked if kind(answer) == "colour"}
    known = [row for row in asked if row[2] in shapes and row[2] in colours]
    drawn = _drawn(known, train_rows, seed)
    captions = [caption(shapes[number], colours[number]) for _, _, number in drawn]
    described = [
        described_answer(question, answer, shapes[number], colours[number]) for question, answer, number in drawn
    ]
    train = _rows(drawn, easy_vqa.get_train_image_paths())
    train = train.add_column("caption", captions).add_column("described", described)
    held_out = list(zip(*easy_vqa.get_test_questions(), strict=True))
    test = _rows(_drawn(held_out, test_rows, seed), easy_vqa.get_test_image_paths())
    return DatasetDict({"train": train, "test": test})


def kind(answer: str) -> str:
    """Returns what a question with this answer asks for."""
    if answer in BINARY:
        return "yes or no"
    return "shape" if answer in SHAPES else "colour"


def negated(question: str) -> bool:
    """Returns whether a question asks for what isn't there, such as "is no circle present?"."""
    return bool({"not", "no"} & {*question.split()})


def caption(shape: str, colour: str) -> str:
    """Returns a sentence that says what is in a picture."""
    return f"{colour} {shape}."


def described_answer(question: str, answer: str, shape: str, colour: str) -> str:
    """Returns an answer after the picture's caption and, where the question is for yes or no, a comparison."""
    if answer not in BINARY:
        return f"{caption(shape, colour)} Answer: {answer}"
    words = question.rstrip("?").split()
    (asked,) = (word for word in words if word in SHAPES + COLOURS)
    seen = shape if asked in SHAPES else colour
    comparison = "is" if seen == asked else "is not"
    return f"{caption(shape, colour)} {seen} {comparison} {asked}. Answer: {answer}"


def _drawn(asked: list[Row], n: int, seed: int) -> list[Row]:
    """Draws questions, of which every eight have each of `_CELLS` once."""
    rng = random.Random(seed)
    shuffled = rng.sample(asked, len(asked))
    wanted = Counter(_CELLS[i % len(_CELLS)] for i in range(n))
    chosen = []
    for (name, is_negated), n_rows in wanted.items():
        matching = [row for row in shuffled if name in (row[1], kind(row[1])) and negated(row[0]) == is_negated]
        chosen += matching[:n_rows]
    return rng.sample(chosen, len(chosen))


def _rows(drawn: list[Row], paths: dict[int, str]) -> Dataset:
    columns = {
        "prompt": [[{"role": "user", "content": question}] for question, _, _ in drawn],
        "image": [paths[number] for _, _, number in drawn],
        "solution": [answer for _, answer, _ in drawn],
        "kind": [kind(answer) for _, answer, _ in drawn],
    }
    return Dataset.from_dict(columns).cast_column("image", Image())
