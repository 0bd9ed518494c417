# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset and their prompts, which worker processes read and encode before the step that needs them."""

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerState

from ..algorithms.metrics import MetricLog, event_count, latest
from ..data.reading.refs import MediaError, OverlongRow, iter_refs
from ..data.rows.batches import (
    BatchShape,
    DatasetRows,
    EndlessRows,
    EpochBatches,
    EvalBatches,
    Row,
    RowBatch,
    StreamBatches,
)
from ..data.rows.columns import rows_to_messages
from ..data.rows.difficulty import DifficultySampler, difficulty_sampler
from ..data.rows.features import Rows, restore_rows, undecoded
from ..data.rows.prefetch import PrefetchPool
from ..encoding.prompts import EncodedPrompt


logger = get_logger(__name__)

# File of the output folder that lists the skipped rows
SKIPPED_ROWS = "skipped_rows.jsonl"

_DROPPED = "Rows with nothing to learn after the cut at `max_length` are dropped, and counted in `media/skipped`."
NONE_LEFT = "None of the dataset's rows can be trained on. The last one: "

# Length assumed for a training stream if `max_skipped_rows` is a share.
# Also the maximum number of rows that are searched for a stream's first readable row.
_STREAM_LENGTH = 1000


@dataclass(eq=False)
class EncodedRow:
    """Row of a dataset and its prompt, one object for all completions of a group."""

    row_index: int
    row: dict[str, Any]  # all columns; media are decoded when they are accessed
    stored: Row  # the same columns, with media as the dataset stores them, undecoded
    # The prompt as text, or as messages whose media are `MediaRef`s; `None` if an environment makes it
    messages: Any = None
    prompt: EncodedPrompt | None = None  # `None` without media: text is encoded with its batch
    # A teacher's prompt; `None` without media, or if the teacher reads `prompt`, too
    teacher_prompt: EncodedPrompt | None = None


class _ReadRow(NamedTuple):
    """Row of a dataset, and its encoded prompts."""

    row: Row
    prompt: Any = None
    decoded: Any = ()  # decoded media of the prompt, which loses them when a worker process pickles it
    messages: Any = None  # messages of the prompt, made from this row alone
    teacher_prompt: Any = None  # a teacher's prompt, if it isn't `prompt`
    teacher_decoded: Any = ()


def skip_limit(max_skipped_rows: float, n_rows: int) -> int:
    """Returns how many of `n_rows` rows may be skipped. `max_skipped_rows` below 1 is a share of them."""
    return int(max_skipped_rows) if max_skipped_rows >= 1 else max(1, int(max_skipped_rows * n_rows))


class RowStream:
    """
    Reads the rows of datasets or streams, and encodes their prompts by `encode`, which is `None` if user code makes
    prompts, and gets the messages of `messages`. With `on_media_error="skip"`, rows that can't be read are skipped,
    and with `may_drop` overlong ones; in training, others replace them.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        *,
        encode: Callable[..., Any] | None,
        messages: Callable[[list[Row]], list[Any]] | None = None,
        encode_teacher_prompt: Callable[[Row], Any] | None = None,
        columns: Collection[str] | None = None,
        may_drop: Callable[[Row], bool] | None = None,
        metrics: MetricLog,
        state: Callable[[], TrainerState],
    ):
        self.skipped: dict[int, str] = {}  # errors of skipped training rows, by row index
        self._start_errors: dict[int, str] = {}  # errors of rows at the start of a stream, until a batch records them
        skips = args.on_media_error == "skip"
        # Errors for which a row is skipped. An `OverlongRow` is a `MediaError`, too.
        self._skipped_errors = MediaError if skips else OverlongRow if may_drop else ()
        self._may_drop = may_drop
        self._skips = skips
        self._args = args
        self._accelerator = accelerator
        self._metrics = metrics
        self._state = state
        self._rules = args.rules
        self._encode = encode
        self._messages = messages
        self._columns = columns
        self._encode_teacher_prompt = encode_teacher_prompt
        self._rows: DatasetRows | None = None  # training rows; `None` for a stream
        self._batches: Any = None  # batches of the training rows
        self._group_size = 1
        self._last_row: Row | None = None  # last row of a stream that could be read
        self._extra_rows: EndlessRows | None = None  # rows for `draw`
        self._n_extra = 0  # number of extra rows that all ranks have drawn
        self.sampler: DifficultySampler | None = None  # sampler of training rows
        self._pool: PrefetchPool | None = None
        self._n_prefetch = 0  # number of batches to prefetch
        self._uses_pool = False  # whether the pool reads rows: of a transform, or once any row had a prompt with media
        self._coming_rows: list[int] = []  # row indices of the next batches
        self._coming_extra_rows: list[int] = []
        self._checked_datasets: WeakSet[Any] = WeakSet()  # datasets whose columns were checked
        # Errors of rows that can't be read, by row index, for each dataset that was evaluated
        self._unreadable: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def state_dict(self) -> dict[str, Any]:
        """Returns the skipped rows, the number of extra rows that were drawn, and the difficulty of rows."""
        difficulty = None if self.sampler is None else self.sampler.state_dict()
        return {"skipped": self.skipped, "n_extra": self._n_extra, "difficulty": difficulty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Rows stay skipped, even if the error was temporary, such as a server's
        self.skipped = state["skipped"]
        self._n_extra = state["n_extra"]
        if self.sampler is not None and state["difficulty"] is not None:
            self.sampler.load_state_dict(state["difficulty"])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # Loaders

    def train_loader(
        self,
        dataset: Any,
        shape: BatchShape,
        n_prefetch: int,
        order: Callable[[int, int], torch.Tensor] | None,
        **options,
    ) -> DataLoader:
        """
        Returns a loader of this rank's [`RowBatch`]es, which prefetches the rows of `n_prefetch` batches.
        `order(n_rows, epoch)` returns row indices, `None` is the dataset's order. Accelerate mustn't shard the batches
        again.
        """
        self.close()
        self._group_size = shape.completions_per_row
        self._n_prefetch = n_prefetch
        self._coming_rows = []
        if isinstance(dataset, IterableDataset):
            if self._skips:
                _check_whole_groups(shape)
            self._rows = None
            read_batch = self._read_training_batch
            self._batches = StreamBatches(
                undecoded(dataset), shape, read_batch, self._columns, skip_to_readable=self._from_first_readable
            )
            return _batch_loader(self._batches, **options)
        args = self._args
        if getattr(args, "difficulty_sampling", False):
            self.sampler = difficulty_sampler(dataset, shape.n_rows, args.order_seed, n_prefetch)
        dataset = self._select_columns(dataset)
        self._rows = rows = DatasetRows(dataset, args.seed)
        self._extra_rows = EndlessRows(dataset, args.seed + 1)
        self._batches = EpochBatches(
            len(dataset),
            shape,
            self._read_training_batch,
            order,
            self.sampler,
            lambda: self.skipped,  # a function, as a checkpoint replaces the dictionary
        )
        # A transform stays in this process, where its state changes, unless workers are asked for
        n_workers = max(args.dataloader_num_workers, 0 if rows.is_transformed else 1)
        if min(n_prefetch, n_workers) > 0 and sys.platform == "linux" and self._encode is not None:  # the pool forks
            self._uses_pool = self._uses_pool or rows.is_transformed
            # Workers leave out messages, because a pickled `MediaRef` becomes a text. `_as_encoded_rows` adds them.
            self._pool = PrefetchPool(
                lambda index: self._read_row(rows[index])._replace(messages=None),
                n_workers,
                lambda index: self._time_limit(rows[index]),
            )
        return _batch_loader(self._batches, len(dataset), **options)

    def eval_loader(
        self, dataset: Any, completions: int, sampler: Callable[[Any], Any], shuffle: bool = False, **options
    ) -> DataLoader:
        """
        Returns a loader of [`RowBatch`]es to evaluate. If rows may be skipped, all rows are first read once, to find
        the rows to leave out. `sampler` orders the row indices of a dataset, and `shuffle` the rows of a stream. For
        the option `whole`, see [`EvalBatches`].
        """
        args = self._args
        accelerator = self._accelerator
        size = self._args.eval_batch_size
        ranks = accelerator.num_processes, accelerator.process_index
        whole = options.pop("whole", False)
        options["collate_fn"] = options.get("collate_fn", _unchanged)
        if isinstance(dataset, IterableDataset):
            stream = undecoded(dataset)
            stream = stream.shuffle(seed=args.seed) if shuffle else stream
            read_batch = partial(self._read_batch, completions=completions, rows=None)
            shape = BatchShape(size, completions, 1, *ranks, drop_last=False)
            batches = StreamBatches(stream, shape, read_batch, self._columns, use_rank_shards=False)
            batches.left_out = self._find_unreadable(dataset, batches.rows())
            own_batches: Any = EvalBatches(batches.rows, read_batch, size, completions, ranks)
            no_rows: Any = _Unindexed(None)
            return DataLoader(no_rows, batch_sampler=own_batches, **options)
        rows = DatasetRows(self._select_columns(dataset))
        read_batch = partial(self._read_batch, completions=completions, rows=rows)
        unreadable = self._find_unreadable(dataset, map(rows.__getitem__, range(len(rows))))
        row_indices: Any = [index for index in range(len(rows)) if index not in unreadable]
        n_rows = len(row_indices)
        order = sampler(row_indices)
        if order is None:  # of transformers with several ranks
            order = range(n_rows)
        ordered: Callable = lambda: [row_indices[key] for key in order][::completions]  # noqa: E731
        shape_of_last = n_rows, args.dataloader_drop_last, whole
        batches = EvalBatches(ordered, read_batch, size, completions, ranks, *shape_of_last)
        # accelerate takes this number as that of the last batch, and leaves out repeated rows of predictions
        loaded: Any = _Unindexed(n_rows)
        loaded.total_dataset_length = batches.n_left
        return DataLoaderShard(loaded, batch_sampler=batches, **options)

    def is_new(self, dataset: Rows) -> bool:
        """Returns whether a dataset wasn't an argument of this method yet."""
        if isinstance(dataset, (Dataset, IterableDataset)):
            n_checked_datasets = len(self._checked_datasets)
            self._checked_datasets.add(dataset)
            return len(self._checked_datasets) > n_checked_datasets
        return True

    def read_first(self, dataset: Dataset | Sequence[Mapping[str, Any]]) -> Row | None:
        """Reads and encodes the first row of a dataset for evaluation. Returns `None` if the row would be skipped."""
        is_dataset = isinstance(dataset, Dataset)
        row = DatasetRows(self._select_columns(dataset))[0] if is_dataset else Row(0, dict(dataset[0]))
        try:
            self._read_row(row)
        except self._skipped_errors:
            return None
        return row

    def left_out(self, dataset: Dataset) -> dict[int, str]:
        """Returns the errors of rows that evaluation loaders of a dataset leave out, by row index."""
        return self._unreadable.get(dataset, {})

    def draw(self, n: int) -> RowBatch:
        """
        Returns this rank's next `n` extra rows, in an endless order that is independent of the batches. With `n=3` and
        2 ranks, rank 0 gets positions 0 to 2 of the order, and rank 1 gets 3 to 5. The next call starts at position 6.
        """
        assert self._extra_rows is not None
        n_ranks = self._accelerator.num_processes
        rank = self._accelerator.process_index
        start = self._n_extra
        self._n_extra += n_ranks * n
        row_indices = self._extra_rows.row_indices(start + rank * n, n)
        # Rows of the next call, to prefetch them. The next call comes if too few groups have signal.
        self._coming_extra_rows = self._extra_rows.row_indices(start + (n_ranks + rank) * n, n)
        keys = sum(([index] * self._group_size for index in row_indices), [])
        return RowBatch(keys, self._read_training_batch)

    # Batches of the run, counted from its first one

    @property
    def _step_counts(self) -> tuple[int, int]:
        """Number of optimizer steps of the run, and of accumulated micro-batches per step."""
        return self._state().max_steps, self._args.gradient_accumulation_steps

    def batch_indices(self, start: int, n: int) -> range:
        """Returns the indices of at most `n` batches of the run, from `start` on."""
        return self._batches.batch_indices(start, n, *self._step_counts)

    def batch(self, batch_index: int) -> tuple[RowBatch, int]:
        """Returns a batch and the optimizer step that uses it, also if the loader hasn't yielded the batch yet."""
        return self._batches.batch(batch_index), self._batches.steps_before(
            batch_index, self._args.gradient_accumulation_steps
        )

    def restore_batches(self, row_indices: dict[int, list[int]]) -> None:
        """
        Restores the row indices of batches, by batch index, from a checkpoint. Batches formed anew after a resume
        would have replacements for rows that were skipped only after the batches were first formed.
        """
        self._batches.checkpoint_keys = row_indices

    def without_prompts(self, rows: Sequence[dict[str, Any]]) -> list[EncodedRow]:
        """Returns [`EncodedRow`]s without prompts for rows that didn't come from a loader."""
        return self._as_encoded_rows(
            [_ReadRow(Row(getattr(row, "row_index", i), dict(row))) for i, row in enumerate(rows)]
        )

    def _select_columns(self, dataset: Dataset) -> Dataset:
        if self._columns is None:
            return dataset
        return dataset.remove_columns([name for name in dataset.column_names if name not in self._columns])

    # Rows

    def _read_training_batch(self, batch: RowBatch) -> list[EncodedRow]:
        rows = self._rows
        n_prefetch = self._n_prefetch
        if rows is not None and rows.is_transformed and batch.batch_index is not None:
            epoch, index = divmod(batch.batch_index, self._batches.n_batches)
            n_prefetch = min(n_prefetch, self._batches.n_batches - 1 - index)  # none of the next epoch
            if rows.epoch != epoch:
                rows.epoch = epoch
                self._fork_anew(batch)
        encoded_rows = self._read_batch(batch, self._group_size, rows, training=True)
        self._uses_pool = self._uses_pool or any(row.prompt is not None for row in encoded_rows)
        if self._pool is not None and self._uses_pool:
            if batch.batch_index is not None:
                self._coming_rows = self._batches.coming(batch.batch_index, n_prefetch, *self._step_counts)
            self._pool.prefetch([*self._coming_extra_rows, *self._coming_rows])
        return encoded_rows

    def _fork_anew(self, batch: RowBatch) -> None:
        """Reads a batch in new workers, which get the state that a transform has now."""
        if self._pool is not None:
            self._pool.close()
            self._pool.prefetch(batch.keys)

    def _read_batch(
        self, batch: RowBatch, completions: int, rows: DatasetRows | None, training: bool = False
    ) -> list[EncodedRow]:
        """
        Returns the row of each completion, read once per group of `completions`. In training, other rows replace
        skipped rows, in as many rounds as it takes.
        """
        rank_start = self._accelerator.process_index * len(batch)  # a group may straddle ranks
        row_indices = [*map(_row_index, batch.keys)]
        # For each completion, whether it is the first of its group on this rank
        starts_group = [
            i == 0 or (rank_start + i) % completions == 0 or row_indices[i] != row_indices[i - 1]
            for i in range(len(batch))
        ]
        # Evaluation raises errors here, since its loaders leave out unreadable rows from the start
        skipped_errors = self._skipped_errors if training else ()
        batch_errors = dict[int, str]()
        read_rows: dict[int, _ReadRow] = {}  # by the batch index at which a group begins
        # In each round, ranks share their new errors. The next round reads replacements of these rows, until no rank
        # has a new error.
        while True:
            new_errors: dict[int, str] = {}
            if training:  # errors of rows at the start of a stream count with the first batch
                new_errors, self._start_errors = self._start_errors, new_errors
            for i in (i for i in range(len(batch)) if starts_group[i]):
                key = self._replacement(batch.keys[i], batch_errors) if training else batch.keys[i]
                if i in read_rows and read_rows[i].row.row_index == _row_index(key):
                    continue  # an earlier round has read the row
                try:
                    read_rows[i] = self._take_row(key, rows, training)
                except skipped_errors as error:
                    new_errors[_row_index(key)] = str(error)
            if skipped_errors:  # a stream counts as `_STREAM_LENGTH` rows
                new_errors = self._record_errors(new_errors, self.skipped, len(rows or range(_STREAM_LENGTH)), "train")
                batch_errors |= new_errors
            if not new_errors:
                break
        if skipped_errors:
            self._metrics.add({"media/skipped": event_count(len(batch_errors))}, mode="train")
        groups = self._as_encoded_rows([read_rows[i] for i in sorted(read_rows)])
        # A completion's group is the last one that starts at or before it
        return [groups[n_started - 1] for n_started in accumulate(starts_group)]

    def _time_limit(self, row: Row) -> float:
        """The limit is in seconds: `media_timeout` to download, to unpack and to decode each medium."""
        chat = row.get("prompt") or row.get("messages") or ""  # tokenized rows have neither column
        with suppress(MediaError):
            prompt_row = Row(row.row_index, {**row, "prompt": chat})
            media = rows_to_messages([prompt_row], self._args.ignored_media_columns or (), rules=self._rules)
            return 3 * self._rules.media_timeout * max(sum(1 for _ in iter_refs(media)), 1)
        return 3 * self._rules.media_timeout

    def _take_row(self, key: Any, rows: DatasetRows | None, training: bool) -> "_ReadRow":
        """`key` is the row index or, without `rows`, the row itself."""
        if training and self._pool is not None and self._uses_pool:
            read_row = self._pool.take(key)
        else:
            read_row = self._read_row(key if rows is None else rows[key])
        for prompt, decoded_media in (
            (read_row.prompt, read_row.decoded),
            (read_row.teacher_prompt, read_row.teacher_decoded),
        ):
            if decoded_media:
                prompt.decoded = decoded_media  # a prompt from a worker has lost them
        if training:
            self._last_row = read_row.row
        return read_row

    def _read_row(self, row: Row) -> "_ReadRow":
        if self._encode is None:
            return _ReadRow(row)
        if self._messages is None:
            prompt = self._encode(row)
            messages = None
        else:
            (messages,) = self._messages([row])
            prompt = self._encode(row, messages)
        teacher_prompt = None if self._encode_teacher_prompt is None else self._encode_teacher_prompt(row)
        decoded_media = (getattr(encoded, "decoded", ()) for encoded in (prompt, teacher_prompt))
        return _ReadRow(row, prompt, next(decoded_media), messages, teacher_prompt, next(decoded_media))

    def _as_encoded_rows(self, read_rows: "list[_ReadRow]") -> list[EncodedRow]:
        restored_rows = restore_rows([item.row for item in read_rows], self._rules)
        return [
            EncodedRow(item.row.row_index, restored, item.row, messages, item.prompt, item.teacher_prompt)
            for item, restored, messages in zip(
                read_rows, restored_rows, self._uniform_messages(read_rows), strict=True
            )
        ]

    def _uniform_messages(self, read_rows: "list[_ReadRow]") -> list[Any]:
        """Returns the messages of rows in one format, with blocks if any row has media."""
        messages = [item.messages for item in read_rows]
        formats = {(item.prompt is None, type(item.messages)) for item in read_rows}
        if self._messages is None or (len(formats) == 1 and messages[0] is not None):
            return messages
        # Prompts without media are formatted again, and messages that a worker left out are added. `self._messages`
        # uses blocks for all rows if any row has media. So a row with media, if there is one, is converted along with
        # them, and its result is dropped.
        indices = [i for i, item in enumerate(read_rows) if item.prompt is None or item.messages is None]
        with_media = [item.row for item in read_rows if item.prompt is not None and item.messages is not None][:1]
        converted = self._messages([*with_media, *(read_rows[i].row for i in indices)])[len(with_media) :]
        for i, item in zip(indices, converted, strict=True):
            messages[i] = item
        return messages

    # Rows that can't be read

    def _replacement(self, key: Any, batch_errors: Collection[int]) -> Any:
        """
        Returns the key or, if its row is skipped, a replacement: for a dataset another row index, for a stream the
        last row that could be read.
        """
        if self._rows is not None:
            return other_row(key, self.skipped, len(self._rows), self._args.seed)
        # `self.skipped` would be wrong here: in a stream's next epoch, another row may have the index of a skipped row
        return self._last_row if key.row_index in batch_errors else key

    def _from_first_readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yields the rows of a stream in an epoch, from the first readable one on. Records errors of earlier rows."""
        for row in islice(rows, _STREAM_LENGTH if self._skipped_errors else 0):
            try:
                self._read_row(row)
            except self._skipped_errors as error:
                self._start_errors[row.row_index] = str(error)
            else:
                self._last_row = row
                yield row
                break
        else:
            if self._start_errors:
                raise MediaError(NONE_LEFT + [*self._start_errors.values()][-1])
        yield from rows

    def _record_errors(
        self, errors: dict[int, str], skipped: dict[int, str], n_rows: int, split: str
    ) -> dict[int, str]:
        """Adds errors of a split of `n_rows` rows to `skipped` and a file. Returns all ranks' errors by row index."""
        all_errors = dict(gather_object(list(errors.items())))
        new_errors = dict(sorted(all_errors.items() - skipped.items()))
        skipped.update(all_errors)
        file = self.write_errors(new_errors, split)
        max_skipped_rows = self._args.max_skipped_rows
        # Then only overlong rows are skipped (`may_drop`), and their number has no limit
        if self._args.on_media_error == "raise":
            if all_errors:
                logger.warning_once(_DROPPED)
        elif len(skipped) > skip_limit(max_skipped_rows, n_rows):
            raise MediaError(
                f"{len(skipped)} rows can't be read, more than `max_skipped_rows` ({max_skipped_rows:g}) allows; they "
                f"are listed in {file}. The last one: {list(skipped.values())[-1]}"
            )
        return all_errors

    def write_errors(self, errors: dict[int, str], split: str) -> Path:
        """Adds errors of rows, by row index, to the file of skipped rows, and returns its path."""
        file = Path(self._args.output_dir, SKIPPED_ROWS)
        if errors and self._accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                for row_index, error in errors.items():
                    record = {"step": self._state().global_step, "split": split, "row": row_index, "error": error}
                    lines.write(json.dumps(record) + "\n")
        return file

    def _find_unreadable(self, dataset: Any, rows: Iterable[Row]) -> dict[int, str]:
        """Returns errors of an evaluation dataset's unreadable rows. At the first call, each rank reads a share."""
        if not self._skipped_errors or self._encode is None:
            return {}
        if dataset not in self._unreadable:
            errors: dict[int, str] = {}
            unreadable: dict[int, str] = {}
            n_rows = 0
            for n_rows, row in enumerate(rows, start=1):
                is_mine = n_rows % self._accelerator.num_processes == self._accelerator.process_index
                if is_mine and (self._skips or self._may_drop is None or self._may_drop(row)):
                    try:
                        self._read_row(row)
                    except self._skipped_errors as error:
                        errors[row.row_index] = str(error)
            self._record_errors(errors, unreadable, n_rows, "eval")
            if unreadable and len(unreadable) == n_rows:
                raise MediaError(f"No row to evaluate can be read. The last one: {list(unreadable.values())[-1]}")
            self._unreadable[dataset] = unreadable
        self._metrics.add({"media/skipped": latest(len(self._unreadable[dataset]))}, mode="eval")
        return self._unreadable[dataset]


def _check_whole_groups(shape: BatchShape) -> None:
    if shape.size % shape.completions_per_row != 0:
        raise ValueError(
            "With `on_media_error='skip'` and a stream, a rank replaces an unreadable row with one of its "
            f"earlier rows, so it must have whole groups: make `per_device_train_batch_size` * "
            f"`steps_per_generation` ({shape.size}) a multiple of `num_generations` ({shape.completions_per_row})."
        )


class _Unindexed:
    """Dataset for a loader whose batch sampler yields whole batches, not indices. Returns the batches unchanged."""

    def __init__(self, n_rows: int | None):
        self._n_rows = n_rows

    def __len__(self) -> int:
        if self._n_rows is None:
            raise TypeError("A stream has no length.")
        return self._n_rows

    def __getitems__(self, batch: RowBatch) -> RowBatch:
        return batch


def _batch_loader(batches: Any, n_rows: int | None = None, collate_fn: Callable | None = None) -> DataLoader:
    dataset: Any = _Unindexed(n_rows)
    loader: Any = DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn or _unchanged)
    loader.set_epoch = batches.set_epoch  # before transformers 5.17, `Trainer` looks for it only in the loader
    return loader


def _unchanged(batch: Any) -> Any:
    return batch


def _row_index(key: Any) -> int:
    return getattr(key, "row_index", key)


def named_dataset(datasets: Any, dataset: Any) -> Any:
    """Returns the dataset for an argument of `get_eval_dataloader`: a dataset, a name, or `None` for the trainer's."""
    dataset = datasets if dataset is None else datasets[dataset] if isinstance(dataset, str) else dataset
    if dataset is None:
        raise ValueError("There is no dataset to evaluate; pass `eval_dataset` to the trainer or to `evaluate`.")
    return dataset


def warn_of_positions(prompts: Sequence[EncodedPrompt], row_indices: Sequence[int], model: PreTrainedModel) -> bool:
    """Warns of the first row with more positions than the model was trained for. Returns whether there is one."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    for prompt, row_index in zip(prompts, row_indices, strict=True):
        n_positions = int(prompt.position_ids.max()) + 1
        if n_positions > limit:
            logger.warning(
                f"Row {row_index} takes {n_positions} positions, more than the {limit} that the model was trained on "
                "(`max_position_embeddings`). Remove such rows, make their media smaller, or scale the model's "
                "positions (`rope_scaling` of its config).",
                main_process_only=False,
            )
            return True
    return False


def other_row(row_index: int, skipped: Mapping[int, str], n_rows: int, seed: int) -> int:
    """Returns the row index, or a replacement if the row is skipped. Ranks with equal `skipped` get the same index."""
    if row_index not in skipped:
        return row_index
    if len(skipped) >= n_rows:
        raise MediaError(NONE_LEFT + [*skipped.values()][-1])
    candidates = (random.Random(f"{seed} {row_index} {attempt}").randrange(n_rows) for attempt in count())
    return next(index for index in candidates if index not in skipped)
