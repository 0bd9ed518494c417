# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset with their stored media."""

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset

from .columns import MEDIA_COLUMNS, TEACHER
from .features import undecoded


T = TypeVar("T")


class Row(dict):
    """The columns of a row, and its number in the dataset, which errors name."""

    def __init__(self, number: int, columns: dict[str, Any]):
        super().__init__(columns)
        self.number = number

    def __reduce__(self) -> tuple:
        return Row, (self.number, dict(self))


class DatasetRows:
    def __init__(self, dataset: Dataset):
        self.dataset = undecoded(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Row]:
        rows = self.dataset.__getitems__(numbers)
        return [Row(number, _with_arrays(row)) for number, row in zip(numbers, rows, strict=True)]


class EndlessRows:
    """The rows of a dataset in one shuffled order per epoch, endlessly."""

    def __init__(self, dataset: Dataset, seed: int):
        self.rows = DatasetRows(dataset)
        self.seed = seed
        self._order = lru_cache(maxsize=2)(self._order)

    def at(self, start: int, n: int) -> list[Row]:
        return self.rows.__getitems__(self.numbers(start, n))

    def numbers(self, start: int, n: int) -> list[int]:
        """Row numbers at positions of the endless order."""
        places = (divmod(place, len(self.rows)) for place in range(start, start + n))
        return [int(self._order(epoch)[place]) for epoch, place in places]

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """Converts numeric lists, as which Arrow returns arrays, back to arrays, which copy faster."""
    media = {key: _as_array(value) for key, value in row.items() if key.removeprefix(TEACHER) in MEDIA_COLUMNS}
    for column in ("prompt", "messages", f"{TEACHER}prompt"):
        if isinstance(row.get(column), list):
            media[column] = [
                {**message, "content": [_as_array(block) for block in message["content"]]}
                if isinstance(message, dict) and isinstance(message.get("content"), list)
                else message
                for message in row[column]
            ]
    return {**row, **media}


def _as_array(value: T) -> T | np.ndarray | list | dict:
    if isinstance(value, dict):
        return {key: _as_array(item) for key, item in value.items()}
    if not isinstance(value, list) or not value:
        return value
    first = value[0]
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, (int, float)):
        try:
            return np.asarray(value, dtype=np.float32 if isinstance(first, float) else None)
        except ValueError:  # ragged, for which the loader of the medium raises
            return value
    return [_as_array(item) for item in value]
