# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset and their prompts, read and encoded in worker processes ahead of the step that needs them."""

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, count, cycle, islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerState

from ..data.columns import MediaError
from ..data.features import restore_rows, undecoded
from ..data.prefetch import PrefetchPool
from ..data.rows import DatasetRows, EndlessRows, Row
from ..encoding.prompts import EncodedPrompt


logger = get_logger(__name__)

# In the output folder
SKIPPED_ROWS = "skipped_rows.jsonl"

# `max_skipped_rows` as a share is of this many rows if a stream doesn't know its length
_STREAM_LENGTH = 1000


@dataclass(eq=False)
class EncodedRow:
    """A row of a dataset and its prompt, one object for all completions of a group."""

    number: int  # of the row in its dataset
    row: dict[str, Any]  # all columns as the dataset has them; a feature decodes its medium when it is accessed
    stored: Row  # the same without features that decode
    # The prompt as text, or as messages whose media are `MediaRef`s; `None` if an environment makes it
    messages: Any = None
    prompt: EncodedPrompt | None = None  # `None` without media: text is tokenized as the other rows of its batch are


class RowBatch(Sequence):
    """
    Rows of this rank's completions, one item per completion. Reads and encodes them when an item is accessed, so that a
    batch whose completions a checkpoint restored costs nothing.
    """

    def __init__(self, keys: list[Any], read: Callable[["RowBatch"], list[EncodedRow]], place: int | None = None):
        self.keys = keys  # numbers of rows, or rows of a stream
        self.place = place  # among all batches of the run
        self._read = read
        self._rows: list[EncodedRow] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index):
        if self._rows is None:
            self._rows = self._read(self)
        return self._rows[index]

    def __contains__(self, value: object) -> bool:
        return False  # `Trainer` looks for labels


@dataclass(frozen=True)
class BatchShape:
    """How many completions of which rows form a batch of a rank."""

    size: int  # completions on a rank
    completions: int = 1  # of a row
    repeats: int = 1  # micro-batches that a batch is for
    n_ranks: int = 1
    rank: int = 0
    drop_last: bool = True

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.size * self.n_ranks // self.completions

    def share(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's part of a batch."""
        keys = [row for row in rows for _ in range(self.completions)]
        return keys[self.rank * self.size : (self.rank + 1) * self.size]

    def complete(self, rows: list[Any], first: Sequence[Any]) -> list[Any]:
        """A last batch that isn't full: dropped, or filled up where ranks would get batches of different sizes."""
        if self.drop_last:
            return []
        return rows if self.n_ranks == 1 else list(islice(chain(rows, cycle(first)), self.n_rows))


class EpochBatches:
    """
    Batch sampler over the rows of a dataset, in the order of TRL's and Accelerate's samplers. All micro-batches that
    use a generation batch get the same object, which reads its rows once.
    """

    def __init__(self, n_rows: int, order: Callable[[int], torch.Tensor], shape: BatchShape, read: Callable):
        self.epoch = 0
        self.n_batches = n_rows // shape.n_rows if shape.drop_last else math.ceil(n_rows / shape.n_rows)
        self._order = lru_cache(maxsize=2)(order)  # of this epoch and the one that is prefetched
        self._shape = shape
        self._read = read

    def __len__(self) -> int:
        return self.n_batches * self._shape.repeats

    def __iter__(self) -> Iterator[RowBatch]:
        for place in range(self.epoch * self.n_batches, (self.epoch + 1) * self.n_batches):
            batch = RowBatch(self.keys(place), self._read, place)
            for _ in range(self._shape.repeats):
                yield batch

    def keys(self, place: int) -> list[int]:
        """Numbers of this rank's rows in a batch, counted from the first one of the run."""
        epoch, index = divmod(place, self.n_batches)
        order, n = self._order(epoch), self._shape.n_rows
        rows = order[index * n : (index + 1) * n].tolist()
        return self._shape.share(rows if len(rows) == n else self._shape.complete(rows, order[:n].tolist()))

    def remaining(self, place: int, max_steps: int, accumulation: int) -> int:
        """Batches after this one in a run."""
        epochs, steps = divmod(max_steps, math.ceil(len(self) / accumulation))
        return epochs * self.n_batches + math.ceil(steps * accumulation / self._shape.repeats) - place - 1

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch."""
        self.epoch = epoch

    @property
    def batch_sampler(self) -> "EpochBatches":
        """Itself: where `Trainer` looks for a `set_epoch`, also when it skips batches to resume."""
        return self


class StreamBatches:
    """Batch sampler over a stream, whose rows are numbered as they come."""

    def __init__(self, dataset: IterableDataset, shape: BatchShape, read: Callable, columns: Collection[str] | None):
        whole_groups = shape.size % shape.completions == 0
        if dataset.n_shards >= shape.n_ranks > 1 and whole_groups and shape.drop_last:
            dataset = dataset.shard(num_shards=shape.n_ranks, index=shape.rank)
            shape = BatchShape(shape.size, shape.completions, shape.repeats)
        self.skipped: Collection[int] = ()
        self._dataset = dataset
        self._shape = shape
        self._read = read
        self._columns = columns

    def __len__(self) -> int:
        raise TypeError("A stream has no length.")

    def rows(self) -> Iterator[Row]:
        """The rows of an epoch."""
        for number, row in enumerate(self._dataset):
            if number not in self.skipped:
                yield Row(number, {k: v for k, v in row.items() if self._columns is None or k in self._columns})

    def __iter__(self) -> Iterator[RowBatch]:
        shape, rows, first = self._shape, self.rows(), []
        while chunk := list(islice(rows, shape.n_rows)):
            first = first or chunk
            keys = shape.share(chunk if len(chunk) == shape.n_rows else shape.complete(chunk, first))
            batch = RowBatch(keys, self._read)
            for _ in range(shape.repeats if keys else 0):
                yield batch
        if len(first) < shape.n_rows and shape.drop_last:
            raise too_few_rows(len(first), shape)

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch."""
        self._dataset.set_epoch(epoch)

    @property
    def batch_sampler(self) -> "StreamBatches":
        """As [`EpochBatches.batch_sampler`]."""
        return self


class _Batches:
    """The dataset of a loader whose sampler makes batches."""

    def __getitems__(self, batch: RowBatch) -> RowBatch:
        return batch


class _SizedBatches(_Batches):
    def __init__(self, n_rows: int):
        self._n_rows = n_rows

    def __len__(self) -> int:
        return self._n_rows


class _NumberedRows:
    """The dataset of a loader whose sampler gives places in a list of rows' numbers."""

    def __init__(self, numbers: list[int], read: Callable):
        self._numbers = numbers
        self._read = read

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitems__(self, places: list[int]) -> RowBatch:
        return RowBatch([self._numbers[place] for place in places], self._read)


class RowStream:
    """
    Gives a trainer its rows with encoded prompts, and others in the place of those that can't be read.

    Args:
        args (`MediaArguments`):
            The trainer's config.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's accelerator.
        encode (`Callable[[Row], Any]`, *optional*):
            Encodes the prompt of a row, in a worker if the row is prefetched. `None` if rows alone make no prompts.
        messages (`Callable[[list[Row]], list]`, *optional*):
            Gives the messages of rows of a batch, which come out alike.
        metrics (`dict[str, dict[str, list[float]]]`):
            The trainer's metrics.
        state (`Callable[[], TrainerState]`):
            Gives the trainer's state.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        *,
        encode: Callable[[Row], Any] | None,
        messages: Callable[[list[Row]], list[Any]] | None = None,
        metrics: Any,
        state: Callable[[], TrainerState],
    ):
        self.skipped: dict[int, str] = {}  # training rows that can't be read, and why
        self._args = args
        self._accelerator = accelerator
        self._encode = encode
        self._messages = messages
        self._metrics = metrics
        self._state = state
        self._rows: DatasetRows | None = None  # to train on; `None` for a stream
        self._batches: Any = None  # of these
        self._completions = 1  # of each
        self._last_row: Row | None = None  # of a stream, the last one that could be read
        self._further: EndlessRows | None = None
        self._n_ahead = 0
        self._pool: PrefetchPool | None = None
        self._prefetches = False  # whether a row took work that workers can do
        self._coming: list[int] = []  # rows of the next batches
        self._coming_further: list[int] = []
        # Per dataset that was evaluated, the rows that can't be read and how many there are in all
        self._unreadable: WeakKeyDictionary[Any, tuple[dict[int, str], int]] = WeakKeyDictionary()

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # Loaders

    def train_loader(
        self,
        dataset: Dataset | IterableDataset,
        shape: BatchShape,
        *,
        order: Callable[[int], torch.Tensor],
        n_ahead: int,
        columns: Collection[str] | None = None,
        collate: Callable[[RowBatch], Any] | None = None,
    ) -> DataLoader:
        """
        The loader of training rows, which `Trainer` iterates over once per micro-batch.

        Accelerate doesn't prepare it: batches are those of this rank already, and Accelerate's loaders take each batch
        one step early.

        Args:
            dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
                Rows.
            shape ([`BatchShape`]):
                What a batch is.
            order (`Callable[[int], torch.Tensor]`):
                Gives the numbers of all rows in the order of an epoch.
            n_ahead (`int`):
                Batches to prefetch.
            columns (`Collection[str]`, *optional*):
                Columns of a stream to keep.
            collate (`Callable[[RowBatch], Any]`, *optional*):
                Makes what the loader yields of a batch.
        """
        self.close()
        self._completions, self._n_ahead, self._coming = shape.completions, n_ahead, []
        if isinstance(dataset, IterableDataset):
            self._check_whole_groups(shape)
            self._rows, rows = None, _Batches()
            self._batches = StreamBatches(undecoded(dataset), shape, self._read_training, columns)
        else:
            self._rows, rows = DatasetRows(dataset), _SizedBatches(len(dataset))
            self._batches = EpochBatches(len(dataset), order, shape, self._read_training)
            if self._batches.n_batches == 0:
                raise too_few_rows(len(dataset), shape)
            self._further = EndlessRows(dataset, self._args.seed + 1)
            # Elsewhere processes can't be forked
            if n_ahead > 0 and sys.platform == "linux" and self._encode is not None:
                read = DatasetRows.__getitem__.__get__(self._rows)
                n_workers = max(1, self._args.dataloader_num_workers)
                self._pool = PrefetchPool(lambda number: self._encoded(read(number)), n_workers)
        return DataLoader(rows, batch_sampler=self._batches, collate_fn=collate or _unchanged)

    def eval_loader(
        self,
        dataset: Dataset | IterableDataset,
        batch_size: int,
        *,
        completions: int = 1,
        sampler: Callable[[Any], Any],
        shuffle: bool = False,
        columns: Collection[str] | None = None,
        collate: Callable[[RowBatch], Any] | None = None,
    ) -> DataLoader:
        """
        A loader of rows to evaluate. With `on_media_error="skip"`, all rows are read once, to leave out those that
        can't be.

        Args:
            dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
                Rows.
            batch_size (`int`):
                Completions of a batch on a rank.
            completions (`int`, *optional*, defaults to `1`):
                Completions of a row.
            sampler (`Callable`):
                Gives the sampler of a dataset with a length.
            shuffle (`bool`, *optional*, defaults to `False`):
                Whether a stream is shuffled.
            columns (`Collection[str]`, *optional*):
                Columns of a stream to keep.
            collate (`Callable[[RowBatch], Any]`, *optional*):
                Makes what the loader yields of a batch.
        """
        args, accelerator, collate = self._args, self._accelerator, collate or _unchanged
        if isinstance(dataset, IterableDataset):
            stored = undecoded(dataset)
            stored = stored.shuffle(seed=args.seed) if shuffle else stored
            ranks = accelerator.num_processes, accelerator.process_index
            shape = BatchShape(batch_size, completions, 1, *ranks, drop_last=False)
            batches = StreamBatches(stored, shape, lambda batch: self._read(batch, completions), columns)
            batches.skipped = self._leave_out(dataset, batches.rows)[0]
            return DataLoader(_Batches(), batch_sampler=batches, collate_fn=collate)
        rows = DatasetRows(dataset)
        unreadable, n_rows = self._leave_out(dataset, lambda: map(rows.__getitem__, range(len(rows))), len(rows))
        numbers = [number for number in range(n_rows) if number not in unreadable]
        numbered = _NumberedRows(numbers, lambda batch: self._read(batch, completions, rows))
        loader = DataLoader(
            numbered,
            batch_size,
            sampler=sampler(numbered),
            collate_fn=collate,
            drop_last=args.dataloader_drop_last,
        )
        # A micro-batch is moved when it is used
        return accelerator.prepare_data_loader(loader, device_placement=False)

    def further_rows(self, start: int, n: int) -> RowBatch:
        """
        This rank's `n` training rows behind the `start` that all ranks took before of an endless order of their own,
        each as often as it has completions.
        """
        assert self._further is not None
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        numbers = self._further.numbers(start + rank * n, n)
        self._coming_further = self._further.numbers(start + (ranks + rank) * n, n)
        return RowBatch([number for number in numbers for _ in range(self._completions)], self._read_training)

    def without_prompts(self, rows: Sequence[dict[str, Any]]) -> list[EncodedRow]:
        """Rows from elsewhere than a loader, not encoded yet."""
        stored = [Row(getattr(row, "number", place), dict(row)) for place, row in enumerate(rows)]
        return self._as_encoded(stored, [None] * len(stored))

    def _check_whole_groups(self, shape: BatchShape) -> None:
        if self._args.on_media_error == "skip" and shape.size % shape.completions != 0:
            raise ValueError(
                "With `on_media_error='skip'` and a stream, a process takes an earlier row of its own in the place of "
                f"one that can't be read, so it must have whole groups: make `per_device_train_batch_size` * "
                f"`steps_per_generation` ({shape.size}) a multiple of `num_generations` ({shape.completions})."
            )

    # Rows

    def _read_training(self, batch: RowBatch) -> list[EncodedRow]:
        read = self._read(batch, self._completions, self._rows, training=True)
        self._prefetches = self._prefetches or any(each.prompt is not None for each in read)
        if self._pool is not None and self._prefetches:
            self._prefetch(self._pool, batch)
        return read

    def _prefetch(self, pool: PrefetchPool, batch: RowBatch) -> None:
        """Has the rows of the next batches read while completions of this one are sampled and trained on."""
        if batch.place is not None:
            steps = self._state().max_steps, self._args.gradient_accumulation_steps
            n = min(self._n_ahead, self._batches.remaining(batch.place, *steps))
            self._coming = [key for i in range(n) for key in self._batches.keys(batch.place + 1 + i)]
        pool.want([*self._coming_further, *self._coming])

    def _read(
        self, batch: RowBatch, completions: int, rows: DatasetRows | None = None, training: bool = False
    ) -> list[EncodedRow]:
        """Reads each group's row once. In training, others take the place of rows that can't be read."""
        first = self._accelerator.process_index * len(batch)  # a group may straddle ranks
        numbers = [getattr(key, "number", key) for key in batch.keys]
        begins = [
            i
            for i, number in enumerate(numbers)
            if i == 0 or (first + i) % completions == 0 or number != numbers[i - 1]
        ]
        skips, n_failed = training and self._args.on_media_error == "skip", 0
        read: dict[int, tuple[Row, Any]] = {}  # by the place at which a group begins
        while True:
            failed = {}
            for i in begins:
                key = self._replacement(batch.keys[i]) if training else batch.keys[i]
                number = getattr(key, "number", key)
                if i in read and read[i][0].number == number:
                    continue
                try:
                    read[i] = self._take(key, rows, training)
                except MediaError as error:
                    if not skips:
                        raise
                    failed[number] = str(error)
            if not skips:
                break
            failed = self._skip(failed, self.skipped, _STREAM_LENGTH if rows is None else len(rows), "train")
            n_failed += len(failed)
            if not failed:
                self._metrics["train"]["media/skipped"].append(float(n_failed))
                break
        encoded = self._as_encoded(*map(list, zip(*(read[i] for i in begins), strict=True)))
        groups = accumulate(int(i in read) for i in range(len(batch)))
        return [encoded[group - 1] for group in groups]

    def _take(self, key: Any, rows: DatasetRows | None, training: bool) -> tuple[Row, Any]:
        """A row and its encoded prompt."""
        if rows is None:
            row, prompt, decoded = self._encoded(key)
            self._last_row = row if training else self._last_row
        elif training and self._pool is not None and self._prefetches:
            row, prompt, decoded = self._pool.take(key)
        else:
            row, prompt, decoded = self._encoded(rows[key])
        if decoded:
            prompt.decoded = decoded  # which isn't pickled with it
        return row, prompt

    def _encoded(self, row: Row) -> tuple[Row, Any, Any]:
        prompt = None if self._encode is None else self._encode(row)
        return row, prompt, getattr(prompt, "decoded", ())

    def _as_encoded(self, rows: list[Row], prompts: list[Any]) -> list[EncodedRow]:
        messages = [None] * len(rows) if self._messages is None else self._messages(rows)
        columns = restore_rows(rows, self._args.media_rules)
        return [
            EncodedRow(row.number, *each) for row, *each in zip(rows, columns, rows, messages, prompts, strict=True)
        ]

    # Rows that can't be read

    def _replacement(self, key: Any) -> Any:
        if getattr(key, "number", key) not in self.skipped:
            return key
        if self._rows is not None:
            return other_row(key, self.skipped, len(self._rows), self._args.seed)
        if self._last_row is None:
            raise MediaError(f"{self.skipped[key.number]} (and no row before it can take its place)")
        return self._last_row

    def _skip(self, failed: dict[int, str], skipped: dict[int, str], n_rows: int, split: str) -> dict[int, str]:
        """Notes rows that failed, of the so many of a split. All that did, on any rank."""
        failures, file = dict(gather_object(list(failed.items()))), Path(self._args.output_dir, SKIPPED_ROWS)
        skipped.update(failures)
        if failures and self._accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                for row, error in failures.items():
                    entry = {"step": self._state().global_step, "split": split, "row": row, "error": error}
                    lines.write(json.dumps(entry) + "\n")
        if len(skipped) > skip_limit(self._args.max_skipped_rows, n_rows):
            raise MediaError(
                f"{len(skipped)} rows can't be read, more than `max_skipped_rows` ({self._args.max_skipped_rows:g}) "
                f"allows; they are listed in {file}. The last one: {list(skipped.values())[-1]}"
            )
        return failures

    def _leave_out(
        self, dataset: Any, rows: Callable[[], Iterator[Row]], n_rows: int = 0
    ) -> tuple[dict[int, str], int]:
        """The rows to evaluate that can't be read, and how many rows there are."""
        if self._args.on_media_error != "skip" or self._encode is None:
            return {}, n_rows
        if dataset not in self._unreadable:
            self._unreadable[dataset] = self._find_unreadable(rows())
        self._metrics["eval"]["media/skipped"] = [float(len(self._unreadable[dataset][0]))]
        return self._unreadable[dataset]

    def _find_unreadable(self, rows: Iterator[Row]) -> tuple[dict[int, str], int]:
        """Reads all rows, each on one rank."""
        failed: dict[int, str] = {}
        unreadable: dict[int, str] = {}
        n_rows = 0
        for n_rows, row in enumerate(rows, start=1):
            if n_rows % self._accelerator.num_processes == self._accelerator.process_index:
                try:
                    self._encoded(row)
                except MediaError as error:
                    failed[row.number] = str(error)
        self._skip(failed, unreadable, n_rows, "eval")
        if unreadable and len(unreadable) == n_rows:
            raise MediaError(f"No row to evaluate can be read. The last one: {list(unreadable.values())[-1]}")
        return unreadable, n_rows


def repeat_order(n_rows: int, seed: int, shuffle: bool = True) -> Callable[[int], torch.Tensor]:
    """The order of TRL's `RepeatSampler` in an epoch, `(n_rows,)`: one permutation after the other of one generator."""

    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epoch if shuffle else 0):
            torch.randperm(n_rows, generator=generator)
        return torch.randperm(n_rows, generator=generator) if shuffle else torch.arange(n_rows)

    return order


def seeded_order(n_rows: int, seed: int, shuffle: bool = True) -> Callable[[int], torch.Tensor]:
    """The order of Accelerate's `SeedableRandomSampler` in an epoch, `(n_rows,)`."""

    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(n_rows, generator=generator) if shuffle else torch.arange(n_rows)

    return order


def named_dataset(datasets: Any, dataset: Any) -> Any:
    """The dataset that `get_eval_dataloader` is called with, or those of the trainer it names."""
    dataset = datasets if dataset is None else datasets[dataset] if isinstance(dataset, str) else dataset
    if dataset is None:
        raise ValueError("`eval_dataset` is missing; pass it to the trainer or to `evaluate`.")
    return dataset


def warn_of_positions(prompts: Sequence[EncodedPrompt], numbers: Sequence[int], model: PreTrainedModel) -> bool:
    """Warns of a row that is longer than the model was trained for. Whether it did."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    for prompt, number in zip(prompts, numbers, strict=True):
        taken = int(prompt.position_ids.max()) + 1
        if taken > limit:
            logger.warning(
                f"Row {number} takes {taken} positions, more than the {limit} of the model "
                "(`max_position_embeddings`), beyond which it was never trained. Remove such rows, make their "
                "media smaller, or scale its positions (`rope_scaling` of its config).",
                main_process_only=False,
            )
            return True
    return False


def other_row(row: int, skipped: Collection[int], n_rows: int, seed: int) -> int:
    """The row that takes the place of another, the same on all ranks that skip the same rows."""
    if row not in skipped:
        return row
    if len(skipped) >= n_rows:
        raise ValueError("None of the dataset's rows can be read.")
    drawn = (random.Random(f"{seed} {row} {attempt}").randrange(n_rows) for attempt in count())
    return next(each for each in drawn if each not in skipped)


def skip_limit(max_skipped_rows: float, n_rows: int) -> int:
    """How many rows may be skipped."""
    return int(max_skipped_rows) if max_skipped_rows >= 1 else max(1, int(max_skipped_rows * n_rows))


def too_few_rows(n_rows: int, shape: BatchShape) -> ValueError:
    """The error for a dataset that doesn't fill a batch."""
    return ValueError(
        f"`train_dataset` has {n_rows} rows, fewer than a batch of {shape.n_rows}, so there is nothing to train on. Add "
        "rows, repeat a stream (`train_dataset.repeat(None)`), or lower `per_device_train_batch_size`"
        + ("." if shape.completions == 1 else ", `gradient_accumulation_steps` or `steps_per_generation`.")
    )


def _unchanged(batch: RowBatch) -> RowBatch:
    return batch
