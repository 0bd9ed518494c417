# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reading rows of a dataset with their media."""

import math
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler

from .columns import MEDIA_COLUMNS
from .features import undecoded


# Column of a stream in which rows carry their numbers
NUMBER = "__row__"


class Row(UserDict):
    """A row of a dataset that knows its number, and is read when somebody looks into it."""

    def __init__(self, number: int, read: Callable[[int], dict[str, Any]], block: int | None = None):
        self.number = number
        self.block = block
        self._read = read

    @cached_property
    def data(self) -> dict[str, Any]:
        """The row as the dataset has it."""
        return self._read(self.number)

    def __reduce__(self) -> tuple:
        return Row, (self.number, {self.number: self.data}.__getitem__)

    def to(self, *args, **kwargs) -> "Row":
        """Rows stay where they are: loaders move what has this method by itself, and all others value by value."""
        return self

    def pin_memory(self, *args) -> "Row":
        """As `to`."""
        return self


class FetchOnce:
    """
    A map-style dataset that reads each row of a batch once, its media as they are stored.

    TRL's sampler asks for a prompt once per completion, and for the whole generation batch once per micro-batch. Here
    the repeats are the same [`Row`], so that media are decoded once and shared.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = undecoded(dataset)
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Row]:
        wanted = dict.fromkeys(indices)
        missing = [i for i in wanted if i not in self._rows]
        rows = self.dataset.__getitems__(missing) if missing else []
        fetched = {i: _with_arrays(row) for i, row in zip(missing, rows, strict=True)}
        self._rows = {i: Row(i, fetched.__getitem__) if i in fetched else self._rows[i] for i in wanted}
        return [self._rows[i] for i in indices]


class FetchLater:
    """A map-style dataset whose rows are read when somebody looks into them."""

    def __init__(self, dataset: FetchOnce):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        return Row(int(index), lambda number: self.dataset[number].data, getattr(index, "block", None))


def numbered(dataset: IterableDataset, batch: int, generations: int, repeats: int) -> IterableDataset:
    """Numbers the rows of a stream, in the order in which it gives them, for [`as_rows`]."""

    def number(row: dict[str, Any], place: int) -> dict[str, int]:
        batches, within = divmod(place, batch * repeats)
        return {NUMBER: (batches * batch + within % batch) // generations}

    return dataset.map(number, with_indices=True)


def as_rows(batch: list[dict[str, Any]]) -> list[Row]:
    """Collates rows of a [`numbered`] stream."""
    numbers = [row.pop(NUMBER) for row in batch]
    return [Row(number, {number: row}.__getitem__) for number, row in zip(numbers, batch, strict=True)]


class _Index(int):
    """Index of a row, with the number of the block that it comes in."""

    block: int

    def __new__(cls, row: int, block: int):
        index = super().__new__(cls, row)
        index.block = block
        return index


class LookAhead(Sampler):
    """A sampler that tells which rows come after those that it gave."""

    def __init__(self, sampler: Sampler, size: int, repeats: int, n: int):
        self.sampler: Any = sampler
        self._size, self._length, self._n = size, size * repeats, n
        self._order: Iterator[int] = iter(())
        self._coming: deque[list[_Index]] = deque()
        # Loaders are some batches ahead of what is trained on
        self._blocks: deque[list[_Index]] = deque(maxlen=n + 64)
        self._n_blocks = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        for _ in range(math.ceil(len(self) / self._length)):
            while len(self._coming) <= self._n:
                self._coming.append(self._next_block())
            yield from self._coming.popleft()

    def _next_block(self) -> list[_Index]:
        rows = list(islice(self._order, self._length))
        if not rows:  # the end of an epoch isn't the end of what comes
            self._order = iter(self.sampler)
            rows = list(islice(self._order, self._length))
        block = [_Index(row, self._n_blocks) for row in rows]
        self._n_blocks += 1
        self._blocks.append(block[: self._size])
        return block

    def after(self, block: int, rows: slice, n: int) -> list[int]:
        """The rows that come next."""
        now = block - self._n_blocks + len(self._blocks)
        return list(
            dict.fromkeys(int(row) for each in islice(self._blocks, now + 1, now + 1 + n) for row in each[rows])
        )


class EndlessRows:
    """The rows of a dataset in one shuffled order after the other."""

    def __init__(self, dataset: Dataset, seed: int):
        self.rows = FetchOnce(dataset)
        self.seed = seed
        self._orders: dict[int, torch.Tensor] = {}  # of the epochs read last

    def at(self, start: int, n: int) -> list[Row]:
        """Rows at positions of the endless order."""
        return self.rows.__getitems__(self.numbers(start, n))

    def numbers(self, start: int, n: int) -> list[int]:
        """Which rows are at positions of the endless order."""
        size = len(self.rows)
        epochs = range(start // size, (start + n - 1) // size + 1)
        self._orders = {
            epoch: self._orders[epoch] if epoch in self._orders else self._order(epoch) for epoch in epochs
        }
        places = [divmod(place, size) for place in range(start, start + n)]
        return [int(self._orders[epoch][place]) for epoch, place in places]

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives arrays back as lists, which Accelerate would copy number by number, for every completion."""
    media = {key: _as_array(row[key]) for key in MEDIA_COLUMNS if key in row}
    for column in ("prompt", "messages"):
        if isinstance(row.get(column), list):
            media[column] = [
                {**message, "content": [_as_array(block) for block in message["content"]]}
                if isinstance(message, dict) and isinstance(message.get("content"), list)
                else message
                for message in row[column]
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
