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
    """Columns of a row, with the row's index in the dataset for errors."""

    def __init__(self, row_index: int, columns: dict[str, Any]):
        super().__init__(columns)
        self.row_index = row_index

    def __reduce__(self) -> tuple:
        return Row, (self.row_index, dict(self))


class DatasetRows:
    """Rows of a dataset by their indices, with media as they are stored."""

    def __init__(self, dataset: Dataset):
        self.dataset = undecoded(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row_index: int) -> Row:
        return self.__getitems__([row_index])[0]

    def __getitems__(self, row_indices: list[int]) -> list[Row]:
        rows = self.dataset.__getitems__(row_indices)
        return [Row(row_index, _with_arrays(row)) for row_index, row in zip(row_indices, rows, strict=True)]


class EndlessRows:
    """Endless rows of a dataset, in a new shuffled order for each epoch."""

    def __init__(self, dataset: Dataset, seed: int):
        self.rows = DatasetRows(dataset)
        self.seed = seed
        self._order = lru_cache(maxsize=2)(self._order)

    def at(self, start: int, n: int) -> list[Row]:
        return self.rows.__getitems__(self.row_indices(start, n))

    def row_indices(self, start: int, n: int) -> list[int]:
        """Returns the row indices at `n` positions of the endless order from `start` on."""
        positions = (divmod(position, len(self.rows)) for position in range(start, start + n))
        return [int(self._order(epoch)[position]) for epoch, position in positions]

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """Converts the numeric lists that Arrow returns for arrays back to arrays, which copy faster."""
    media = {key: _as_array(value) for key, value in row.items() if key.removeprefix(TEACHER) in MEDIA_COLUMNS}
    for column in ("prompt", "messages", "chosen", "rejected", f"{TEACHER}prompt"):
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
        except ValueError:  # ragged lists, for which the loader of the medium raises
            return value
    return [_as_array(item) for item in value]
