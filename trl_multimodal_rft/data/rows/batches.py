# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset, and this rank's batches of rows, in the order of TRL and Accelerate."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count, cycle, islice, repeat
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from .difficulty import DifficultySampler
from .features import is_transformed, undecoded
from .names import MEDIA_COLUMNS, TEACHER
from .seeds import seeded


T = TypeVar("T")


class Row(dict):
    """A row as a dictionary of its columns, with the row index for error messages."""

    def __init__(self, row_index: int, columns: dict[str, Any]):
        super().__init__(columns)
        self.row_index = row_index

    def __reduce__(self) -> tuple:
        return Row, (self.row_index, dict(self))


class DatasetRows:
    """
    Rows of a dataset by row index. Media aren't decoded.

    With a `seed`, the random numbers of a transform depend on it, on the `epoch` and on the row index alone.
    """

    epoch: int | None = None  # epoch of the batch that is read, `None` before the first one

    def __init__(self, dataset: Dataset, seed: int | None = None):
        self.dataset = undecoded(dataset)
        self.is_transformed = is_transformed(dataset)
        self._seed = seed if self.is_transformed else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row_index: int) -> Row:
        with nullcontext() if self._seed is None else seeded(self._seed, self.epoch or 0, row_index):
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
        """Returns the rows at `n` positions of the endless order from `start` on."""
        return self.rows.__getitems__(self.row_indices(start, n))

    def row_indices(self, start: int, n: int) -> list[int]:
        """Returns the row indices at `n` positions of the endless order from `start` on."""
        epochs_and_positions = (divmod(position, len(self.rows)) for position in range(start, start + n))
        return [int(self._order(epoch)[position]) for epoch, position in epochs_and_positions]

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with arrays in place of numeric lists, in which Arrow stores arrays. Arrays copy faster."""
    arrays = {key: _as_array(value) for key, value in row.items() if key.removeprefix(TEACHER) in MEDIA_COLUMNS}
    for column in ("prompt", "messages", "chosen", "rejected", f"{TEACHER}prompt"):
        if isinstance(row.get(column), list):
            arrays[column] = [
                {**message, "content": [_as_array(block) for block in message["content"]]}
                if isinstance(message, dict) and isinstance(message.get("content"), list)
                else message
                for message in row[column]
            ]
    return {**row, **arrays}


def _as_array(value: T) -> T | np.ndarray | list | dict:
    if isinstance(value, dict):
        return {key: _as_array(item) for key, item in value.items()}
    if not isinstance(value, list) or not value:
        return value
    first_leaf = value[0]
    while isinstance(first_leaf, list) and first_leaf:
        first_leaf = first_leaf[0]
    if isinstance(first_leaf, (int, float)):
        try:
            return np.asarray(value, dtype=np.float32 if isinstance(first_leaf, float) else None)
        except ValueError:  # ragged lists, for which the loader of the medium raises
            return value
    return [_as_array(item) for item in value]


class RowBatch(Sequence):
    """
    Rows of a batch on this rank, one item per completion.

    The first access to an item reads all rows. If the completions of a batch come from a checkpoint, no row is read.
    """

    def __init__(
        self,
        keys: list[Any] | Callable[[], list[Any]],
        read: Callable[["RowBatch"], list[Any]],
        batch_index: int | None = None,
        n_counted: int | None = None,
    ):
        self._keys = keys
        self._n_counted = n_counted
        self.batch_index = batch_index  # index of the batch in the run
        self._read_rows = read
        self._rows: list[Any] | None = None

    @property
    def keys(self) -> list[Any]:
        """Row index of each completion, or the row itself for a stream."""
        if callable(self._keys):  # because a [`DifficultySampler`] draws row indices only when the batch is read
            self._keys = self._keys()
        return self._keys

    @property
    def n_counted(self) -> int:
        """Number of the first items that aren't repeated from another batch, since a rank has no more rows."""
        return len(self) if self._n_counted is None else self._n_counted

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index):
        if self._rows is None:
            self._rows = self._read_rows(self)
        return self._rows[index]

    def __contains__(self, value: object) -> bool:
        return False  # `Trainer` looks for labels in a batch; its search must not read the rows


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch; in training, of a generation batch."""

    size: int  # completions on a rank
    completions_per_row: int = 1
    n_repeats: int = 1  # micro-batches that use the batch
    n_ranks: int = 1
    rank: int = 0
    drop_last: bool = True

    @property
    def n_rows(self) -> int:
        """Number of rows on all ranks."""
        return self.size * self.n_ranks // self.completions_per_row

    def keys(self, rows: Sequence[Any], first_rows: Sequence[Any]) -> list[Any]:
        """
        Returns the row of each completion on this rank, for the `rows` of a batch on all ranks. A partial batch
        becomes empty with `drop_last`, is otherwise filled up from `first_rows` of the epoch, and stays partial with
        one rank.
        """
        if len(rows) < self.n_rows and (self.drop_last or self.n_ranks > 1):
            rows = [] if self.drop_last else list(islice(chain(rows, cycle(first_rows)), self.n_rows))
        keys = [*chain.from_iterable(repeat(row, self.completions_per_row) for row in rows)]
        return keys[self.rank * self.size : (self.rank + 1) * self.size]

    def too_few_rows_error(self, n_rows: int) -> ValueError:
        return too_few_rows_error(n_rows, self.n_rows, self.completions_per_row > 1)


def too_few_rows_error(n_rows: int, n_needed: int, has_groups: bool) -> ValueError:
    """Returns the error for a dataset with fewer rows than a batch of groups (`has_groups`) or of single rows."""
    options = "`per_device_train_batch_size`"
    options += ", `gradient_accumulation_steps` or `steps_per_generation`" if has_groups else ""
    return ValueError(
        f"`train_dataset` has {n_rows} rows, fewer than a batch of {n_needed}, so there is nothing to train on."
        f" Add rows, repeat a stream (`train_dataset.repeat(None)`), or lower {options}."
    )


class EpochBatches:
    """
    Batches of a dataset, in the order of `order(n_rows, epoch)` or of a `sampler`, which draws none of `left_out()` as
    long as the others fill a batch. Micro-batches of a batch share a [`RowBatch`], so that rows are read once.
    `accumulation` is the number of micro-batches of a step.
    """

    epoch = 0

    def __init__(
        self,
        n_rows: int,
        shape: BatchShape,
        read: Callable,
        order: Callable[[int, int], torch.Tensor] | None,
        sampler: DifficultySampler | None = None,
        left_out: Callable[[], Collection[int]] = tuple,
    ):
        self.n_batches = n_rows // shape.n_rows if shape.drop_last else math.ceil(n_rows / shape.n_rows)
        if self.n_batches == 0:
            raise shape.too_few_rows_error(n_rows)
        self._shape = shape
        self._read_rows = read
        self._sampler = sampler
        self._left_out = left_out
        self.checkpoint_keys: dict[int, list[int]] = {}  # row indices from a checkpoint, by batch index
        self._batches_in_use: WeakValueDictionary[int, RowBatch] = WeakValueDictionary()
        # Keeps the orders of two epochs, as rows of the next epoch are prefetched
        self._order = lru_cache(2)(lambda epoch: order(n_rows, epoch) if order else torch.arange(n_rows))

    def __len__(self) -> int:
        return self.n_batches * self._shape.n_repeats

    def __iter__(self) -> Iterator[RowBatch]:
        # The next pass is the next epoch, unless `set_epoch` chooses another
        epoch = self.epoch
        self.epoch = self.epoch + 1
        for batch_index in range(epoch * self.n_batches, (epoch + 1) * self.n_batches):
            batch = self.batch(batch_index)
            for _ in range(self._shape.n_repeats):
                yield batch

    def batch(self, batch_index: int) -> RowBatch:
        """Returns the batch at an index of the run. While a batch is in use, each call returns the same object."""
        return self._batches_in_use.setdefault(
            batch_index, RowBatch(partial(self.keys, batch_index), self._read_rows, batch_index)
        )

    def keys(self, batch_index: int) -> list[int]:
        """Returns this rank's row indices in the batch at an index of the run."""
        if batch_index in self.checkpoint_keys:
            return self.checkpoint_keys[batch_index]
        if self._sampler is not None:
            rows = self._sampler.rows(batch_index, self._left_out())  # always a full batch
            return self._shape.keys(rows, rows)
        epoch, index = divmod(batch_index, self.n_batches)
        order = self._order(epoch)
        n_rows = self._shape.n_rows
        return self._shape.keys(order[index * n_rows : (index + 1) * n_rows].tolist(), order[:n_rows].tolist())

    def batch_indices(self, start: int, n: int, max_steps: int, accumulation: int) -> range:
        """Returns the indices of at most `n` batches from `start` on, up to the last batch of the run."""
        # Whole epochs, and steps in the last epoch. `len(self)` counts the micro-batches of an epoch.
        epochs, steps = divmod(max_steps, math.ceil(len(self) / accumulation))
        end = epochs * self.n_batches + math.ceil(steps * accumulation / self._shape.n_repeats)
        return range(start, min(start + n, end))

    def steps_before(self, batch_index: int, accumulation: int) -> int:
        """Returns the number of optimizer steps before a batch is used."""
        epochs, index = divmod(batch_index, self.n_batches)
        return epochs * math.ceil(len(self) / accumulation) + index * self._shape.n_repeats // accumulation

    def coming(self, batch_index: int, n: int, max_steps: int, accumulation: int) -> list[int]:
        """Returns this rank's row indices in the next `n` batches. A sampler may have drawn fewer batches."""
        batch_indices = self.batch_indices(batch_index + 1, n, max_steps, accumulation)
        if self._sampler is None:
            keys = map(self.keys, batch_indices)
        else:
            keys = (self._shape.keys(rows, rows) for rows in self._sampler.coming(batch_indices))
        return [*chain.from_iterable(keys)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def batch_sampler(self):
        """This object. `Trainer` calls `set_epoch` of the batch sampler, also after it has skipped batches."""
        return self


class EvalBatches:
    """
    Batches of an evaluation on a rank: up to `size` items, one for each of a row's `n_repeats` completions.

    Ranks get batches of equal sizes. The last rows are shared among the ranks in smaller batches. If there are fewer
    rows than ranks, some ranks get a row again, which isn't their own. For example, seven rows on two ranks in batches
    of two are the batches [0, 1], [4], [6] of rank 0, and [2, 3], [5], and [0] again of rank 1. With `whole`, all
    batches have `size` items, as in training.
    """

    def __init__(
        self,
        rows: Callable[[], Iterable[Any]],
        read: Callable[[RowBatch], list[Any]],
        size: int,
        n_repeats: int,
        ranks: tuple[int, int],
        n_rows: int | None = None,
        drop_last: bool = False,
        whole: bool = False,
    ):
        self.batch_size = size
        self.num_processes = ranks[0]  # by which accelerate multiplies the batch size
        self._rows = rows
        self._read = read
        self._n_repeats = n_repeats
        self._n_ranks, self._rank = ranks
        self._n_rows = n_rows
        self._drop_last = drop_last
        # Rows in a batch of all ranks, and the least number of rows that ranks can share evenly. Completions of a row
        # stay on one rank if they fit into its batch
        self._step = max(size * self._n_ranks // n_repeats, 1)
        self._unit = self._n_ranks if size % n_repeats == 0 else self._n_ranks // math.gcd(self._n_ranks, n_repeats)
        if whole:
            self._unit = self._step

    def __iter__(self) -> Iterator[RowBatch]:
        rows = iter(self._rows())
        first_rows: list[Any] = []
        for chunk in iter(lambda: list(islice(rows, self._step)), []):
            first_rows = first_rows or chunk
            if len(chunk) == self._step:
                yield self._batch(chunk, first_rows)
            elif not self._drop_last:
                n_even = len(chunk) - len(chunk) % self._unit
                for part in filter(None, (chunk[:n_even], chunk[n_even:])):
                    yield self._batch(part, first_rows)

    def _batch(self, rows: list[Any], first_rows: list[Any]) -> RowBatch:
        n_shared = -(-len(rows) // self._unit) * self._unit
        shared = islice(chain(rows, cycle(first_rows)), n_shared)
        keys = [*chain.from_iterable(repeat(row, self._n_repeats) for row in shared)]
        size = len(keys) // self._n_ranks
        n_counted = min(max(len(rows) * self._n_repeats - self._rank * size, 0), size)
        return RowBatch(keys[self._rank * size : (self._rank + 1) * size], self._read, n_counted=n_counted)

    @property
    def n_left(self) -> int:
        """Number of items of all ranks' last batch that aren't repeated, 0 if none are."""
        n_last = 0 if self._drop_last else (self._n_rows or 0) % self._step
        return n_last % self._unit * self._n_repeats

    def __len__(self) -> int:
        if self._n_rows is None:
            raise TypeError("A stream has no length.")
        n_steps, n_last = divmod(self._n_rows, self._step)
        n_even, n_left = divmod(n_last, self._unit)
        return n_steps + (0 if self._drop_last else (n_even > 0) + (n_left > 0))


class StreamBatches:
    """
    Batches of a stream, whose row indices count the rows as they are read. With `use_rank_shards`, a rank reads only
    its shards, if each rank has one and no group spans two, so rank 1 of 4 counts its rows as 1, 5, 9.
    `skip_to_readable` skips rows before the first readable row of an epoch.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        shape: BatchShape,
        read: Callable,
        columns: Collection[str] | None = None,
        use_rank_shards: bool = True,
        skip_to_readable: Callable[[Iterator[Row]], Iterator[Row]] = iter,
    ):
        self.left_out: Collection[int] = ()  # row indices to skip
        self._first_and_step = 0, 1  # first row index of this rank, and the step to the next
        if use_rank_shards and dataset.n_shards >= shape.n_ranks > 1 and shape.size % shape.completions_per_row == 0:
            dataset = dataset.shard(num_shards=shape.n_ranks, index=shape.rank)
            self._first_and_step = shape.rank, shape.n_ranks
            shape = replace(shape, n_ranks=1, rank=0)
        self._dataset = dataset
        self._shape = shape
        self._read_rows = read
        self._columns = columns
        self._skip_to_readable = skip_to_readable

    def __len__(self) -> int:
        raise TypeError("A stream has no length.")

    def rows(self) -> Iterator[Row]:
        for row_index, row in zip(count(*self._first_and_step), self._dataset, strict=False):
            if row_index not in self.left_out:
                yield Row(row_index, {k: v for k, v in row.items() if self._columns is None or k in self._columns})

    def __iter__(self) -> Iterator[RowBatch]:
        shape = self._shape
        rows = self._skip_to_readable(self.rows())
        first_rows = []
        for chunk in iter(lambda: list(islice(rows, shape.n_rows)), []):
            first_rows = first_rows or chunk
            batch = RowBatch(shape.keys(chunk, first_rows), self._read_rows)
            for _ in range(shape.n_repeats if len(batch) else 0):  # a partial batch that is dropped is empty
                yield batch
        if shape.drop_last and len(first_rows) < shape.n_rows:
            raise shape.too_few_rows_error(len(first_rows))

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)

    @property
    def batch_sampler(self):
        return self


def repeat_order(n_rows: int, epoch: int, seed: int) -> torch.Tensor:
    """Returns the row order of TRL's `RepeatSampler`, `(n_rows,)`. Its generator draws one permutation per epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(n_rows, generator=generator)
    return torch.randperm(n_rows, generator=generator)


def seeded_order(n_rows: int, epoch: int, seed: int) -> torch.Tensor:
    """Returns the row order of Accelerate's `SeedableRandomSampler`, `(n_rows,)`."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed + epoch))
