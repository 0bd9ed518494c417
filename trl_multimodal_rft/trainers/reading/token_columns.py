# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""TRL's columns of tokens, which rows of text get when they are read from a trainer's dataset."""

import uuid
from collections.abc import Callable
from itertools import chain
from weakref import WeakKeyDictionary

from datasets import Dataset, IterableDataset

from ...data.rows.batches import Row
from ..base.signatures import Rows


# Returns the columns of tokens of a row, none for a row with media
Columns = Callable[[Row], dict[str, list[int]]]


class TokenColumns:
    """
    Datasets that show tokens, and those that they were made from, which a run reads. `columns` and `names` return a
    row's and a dataset's new columns of tokens, none if there are media.
    """

    def __init__(self, columns: Columns, names: Callable[[Dataset], list[str]]):
        self._columns = columns
        self._names = names
        self._id = uuid.uuid4().hex
        self._sources: WeakKeyDictionary[Dataset | IterableDataset, Dataset | IterableDataset] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, str]:
        """Returns the state by which `datasets` hashes a transform. The functions' would hold the model's weights."""
        return {"_id": self._id}

    def shown(self, dataset: Rows) -> Rows:
        """
        Returns a dataset that lists columns of tokens, which its rows get when they are read. Leaves formatted
        datasets as is.
        """
        if isinstance(dataset, Dataset) and dataset.format["type"] is None:
            listed = dataset
            for name in self._names(dataset):
                listed = listed.add_column(name, [None] * len(dataset))  # listed here, filled when a row is read
            shown: Dataset | IterableDataset = listed.with_transform(self._add_to_batch)
        elif isinstance(dataset, IterableDataset) and dataset._formatting is None:
            shown = dataset.map(lambda row, index: self._with_columns(row, index), with_indices=True)
        else:
            return dataset
        self._sources[shown] = dataset
        return shown

    def source(self, dataset: Rows) -> Rows:
        """Returns the dataset that a dataset was made from, or the dataset itself."""
        return None if dataset is None else self._sources.get(dataset, dataset)

    def _with_columns(self, row: dict, index: int) -> dict:
        return {**row, **self._columns(Row(index, row))}

    def _add_to_batch(self, batch: dict[str, list]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = [self._with_columns(row, index) for index, row in enumerate(rows)]
        names = dict.fromkeys(chain.from_iterable(rows))
        return {name: [row.get(name) for row in rows] for name in names}
