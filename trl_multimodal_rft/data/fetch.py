# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reading rows of a dataset with their media."""

from typing import Any

import numpy as np
import torch
from datasets import Dataset

from .columns import MEDIA_COLUMNS


class FetchOnce:
    """
    A map-style dataset that reads and decodes each row of a batch once.

    TRL's sampler asks for a prompt once per completion, and for the whole generation batch once per micro-batch. Here
    the repeats are the same row object, so that media are decoded once and shared.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset to read from.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self._rows: dict[int, dict] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        wanted = dict.fromkeys(indices)
        missing = [i for i in wanted if i not in self._rows]
        rows = self.dataset.__getitems__(missing) if missing else []
        fetched = {i: _with_arrays(row) for i, row in zip(missing, rows, strict=True)}
        self._rows = {i: fetched[i] if i in fetched else self._rows[i] for i in wanted}
        return [self._rows[i] for i in indices]


class EndlessRows:
    """
    The rows of a dataset in one shuffled order after the other.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset to read from.
        seed (`int`):
            Seed of the first order; the next one has the next seed.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.rows = FetchOnce(dataset)
        self.seed = seed
        self._orders: dict[int, torch.Tensor] = {}  # of the epochs read last

    def at(self, start: int, n: int) -> list[dict]:
        """
        Rows at positions of the endless order.

        Args:
            start (`int`):
                First position.
            n (`int`):
                Number of rows.

        Returns:
            `list[dict]`: The rows.
        """
        size = len(self.rows)
        epochs = range(start // size, (start + n - 1) // size + 1)
        self._orders = {
            epoch: self._orders[epoch] if epoch in self._orders else self._order(epoch) for epoch in epochs
        }
        places = [divmod(place, size) for place in range(start, start + n)]
        return self.rows.__getitems__([int(self._orders[epoch][place]) for epoch, place in places])

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives arrays back as lists, which Accelerate would copy number by number, for every completion."""
    media = {key: _as_array(row[key]) for key in MEDIA_COLUMNS if key in row}
    if isinstance(row.get("prompt"), list):
        media["prompt"] = [
            {**message, "content": [_as_array(block) for block in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in row["prompt"]
        ]
    return {**row, **media}


def _as_array(value: Any) -> Any:
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
        except ValueError:  # ragged: what loads it will say which medium it is
            return value
    return [_as_array(item) for item in value]
