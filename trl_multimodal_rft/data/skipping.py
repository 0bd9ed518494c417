# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which rows take the place of those that can't be read, and how many may be left out."""

import random
from collections.abc import Collection
from itertools import count


def other_row(row: int, skipped: Collection[int], n_rows: int, seed: int) -> int:
    """
    The row that is used in the place of another, the same in every process that leaves out the same rows.

    Args:
        row (`int`):
            Number of the row that was asked for.
        skipped (`Collection[int]`):
            Numbers of the rows that are left out.
        n_rows (`int`):
            Number of rows of the dataset.
        seed (`int`):
            Seed of the run.

    Returns:
        `int`: The row's own number if it isn't left out, otherwise that of a row drawn for it.

    Raises:
        `ValueError`: If all rows are left out.
    """
    if row not in skipped:
        return row
    if len(skipped) >= n_rows:
        raise ValueError("None of the dataset's rows can be read.")
    drawn = (random.Random(f"{seed} {row} {attempt}").randrange(n_rows) for attempt in count())
    return next(each for each in drawn if each not in skipped)


def skip_limit(max_skipped_rows: float, n_rows: int) -> int:
    """
    How many rows may be left out.

    Args:
        max_skipped_rows (`float`):
            A number of rows, or below 1 a share of them.
        n_rows (`int`):
            Number of rows.

    Returns:
        `int`: The number, at least 1.
    """
    return int(max_skipped_rows) if max_skipped_rows >= 1 else max(1, int(max_skipped_rows * n_rows))
