# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which rows take the place of those that can't be read, and how many may be left out."""

import random
from collections.abc import Collection
from itertools import count


def other_row(row: int, skipped: Collection[int], n_rows: int, seed: int) -> int:
    """The row that is used in the place of another, the same in every process that leaves out the same rows."""
    if row not in skipped:
        return row
    if len(skipped) >= n_rows:
        raise ValueError("None of the dataset's rows can be read.")
    drawn = (random.Random(f"{seed} {row} {attempt}").randrange(n_rows) for attempt in count())
    return next(each for each in drawn if each not in skipped)


def skip_limit(max_skipped_rows: float, n_rows: int) -> int:
    """How many rows may be left out."""
    return int(max_skipped_rows) if max_skipped_rows >= 1 else max(1, int(max_skipped_rows * n_rows))
