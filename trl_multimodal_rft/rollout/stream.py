# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset and their prompts, read and encoded in worker processes ahead of the step that needs them."""

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
from typing import Annotated, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerState

from ..data.reading.refs import MediaError, OverlongRow, iter_refs
from ..data.rows.batches import BatchShape, EpochBatches, RowBatch, StreamBatches
from ..data.rows.columns import rows_to_messages
from ..data.rows.difficulty import DifficultySampler, difficulty_sampler
from ..data.rows.features import restore_rows, undecoded
from ..data.rows.prefetch import PrefetchPool
from ..data.rows.row import DatasetRows, EndlessRows, Row
from ..encoding.prompts import EncodedPrompt
from ..spelling import read_settings


logger = get_logger(__name__)

# In the output folder
SKIPPED_ROWS = "skipped_rows.jsonl"

_DROPPED = "Rows of which `max_length` leaves nothing to learn are dropped, and counted in `media/skipped`."
_NONE_LEFT = "None of the dataset's rows can be trained on. The last one: "

# `max_rows` of `on_media_error` as a share is of this many rows of a stream
_STREAM_LENGTH = 1000


@dataclass(eq=False)
class EncodedRow:
    """A row of a dataset and its prompt, one object for all completions of a group."""

    row_index: int
    row: dict[str, Any]  # all columns as the dataset has them; a feature decodes its medium when it is accessed
    stored: Row  # the same, with media as they are stored
    # The prompt as text, or as messages whose media are `MediaRef`s; `None` if an environment makes it
    messages: Any = None
    prompt: EncodedPrompt | None = None  # `None` without media: text is tokenized as the other rows of its batch are
    teachers: EncodedPrompt | None = None  # what a teacher reads instead, `None` without media


class _Read(NamedTuple):
    """A row as it was read, and what was encoded of it."""

    row: Row
    prompt: Any = None
    decoded: Any = ()  # media of the prompt
    messages: Any = None  # by themselves
    teachers: Any = None  # the prompt of a teacher
    teachers_decoded: Any = ()


@dataclass(frozen=True)
class UnreadableRows:
    """The option `on_media_error`."""

    action: Literal["raise", "skip"] = "raise"
    max_rows: Annotated[float, "[0, inf]"] = 0.1  # that may be skipped, below 1 as a share

    def limit(self, n_rows: int) -> int:
        """How many of a dataset's rows may be skipped."""
        return int(self.max_rows) if self.max_rows >= 1 else max(1, int(self.max_rows * n_rows))


def unreadable_rows(option: str) -> UnreadableRows:
    """Reads the option `on_media_error`."""
    return read_settings(UnreadableRows, "on_media_error", option)


class RowStream:
    """
    Reads and encodes a trainer's rows. In training, it replaces rows that can't be read.

    `encode` encodes the prompt of one row; it is `None` where environments or `rollout_func` make prompts. `messages`
    converts the rows of a batch to messages, which `encode` gets, too. `encode_teachers` encodes what a teacher reads
    of a row, if that is something else. `columns` are those to keep, by default all. With `drops`, other rows take the
    place of an [`~data.reading.refs.OverlongRow`], too, and evaluations leave it out.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        *,
        encode: Callable[..., Any] | None,
        messages: Callable[[list[Row]], list[Any]] | None = None,
        encode_teachers: Callable[[Row], Any] | None = None,
        columns: Collection[str] | None = None,
        drops: bool = False,
        metrics: Any,
        state: Callable[[], TrainerState],
    ):
        self.skipped: dict[int, str] = {}  # training rows that can't be read or learned from, and why
        self._lost: dict[int, str] = {}  # likewise, before the first other row of a stream
        skips = unreadable_rows(args.on_media_error).action == "skip"
        self._skips = MediaError if skips else OverlongRow if drops else ()
        self._args, self._accelerator, self._metrics, self._state = args, accelerator, metrics, state
        self._encode, self._messages, self._columns = encode, messages, columns
        self._encode_teachers = encode_teachers
        self._rows: DatasetRows | None = None  # to train on; `None` for a stream
        self._batches: Any = None  # of these
        self._completions = 1
        self._last_row: Row | None = None  # of a stream, the last one that could be read
        self._extra: EndlessRows | None = None
        self._n_extra = 0  # of these rows that all ranks have drawn
        self.sampler: DifficultySampler | None = None  # of rows to train on
        self._pool: PrefetchPool | None = None
        self._n_prefetch = 0  # batches
        self._has_prompts = False  # until then, there is nothing for workers to do
        self._coming: list[int] = []  # rows of the next batches
        self._coming_extra: list[int] = []
        # Of each dataset that was evaluated, rows that can't be read
        self._unreadable: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def state_dict(self) -> dict[str, Any]:
        """Rows that can't be read, additional ones that were drawn, and how difficult rows are."""
        difficulty = None if self.sampler is None else self.sampler.state_dict()
        return {"skipped": self.skipped, "n_extra": self._n_extra, "difficulty": difficulty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # An error of a server may not show again
        self.skipped, self._n_extra = state["skipped"], state["n_extra"]
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
        A loader of [`RowBatch`]es of this rank, the rows of `n_prefetch` of which are prefetched.

        Accelerate doesn't prepare it: its loaders shard the batches again.
        """
        self.close()
        self._completions, self._n_prefetch, self._coming = shape.completions, n_prefetch, []
        if isinstance(dataset, IterableDataset):
            self._check_whole_groups(shape)
            self._rows, read = None, self._read_training
            self._batches = StreamBatches(undecoded(dataset), shape, read, self._columns, from_first=self._from_first)
            return _batch_loader(self._batches, **options)
        args, left_out = self._args, lambda: self.skipped
        if getattr(args, "difficulty_sampling", False):
            self.sampler = difficulty_sampler(dataset, shape.n_rows, args.seed, n_prefetch)
        dataset = self._select_columns(dataset)
        self._rows, self._extra = DatasetRows(dataset), EndlessRows(dataset, args.seed + 1)
        self._batches = EpochBatches(len(dataset), shape, self._read_training, order, self.sampler, left_out)
        if n_prefetch > 0 and sys.platform == "linux" and self._encode is not None:  # elsewhere nothing can be forked
            rows, n_workers = self._rows, max(1, args.dataloader_num_workers)
            # References to media stay in the process that made them
            self._pool = PrefetchPool(
                lambda number: self._encoded(rows[number])._replace(messages=None),
                n_workers,
                lambda number: self._patience(rows[number]),
            )
        return _batch_loader(self._batches, len(dataset), **options)

    def eval_loader(
        self, dataset: Any, completions: int, sampler: Callable[[Any], Any], shuffle: bool = False, **options
    ) -> DataLoader:
        """
        A loader of [`RowBatch`]es to evaluate. With `on_media_error="skip"`, all rows are read once, to leave out
        those that can't be. `sampler` is for datasets, `shuffle` for streams.
        """
        args, accelerator, size = self._args, self._accelerator, self._args.eval_batch_size
        if isinstance(dataset, IterableDataset):
            stream = undecoded(dataset)
            stream = stream.shuffle(seed=args.seed) if shuffle else stream
            ranks = accelerator.num_processes, accelerator.process_index
            shape = BatchShape(size, completions, 1, *ranks, drop_last=False)
            read = partial(self._read, completions=completions, rows=None)
            batches = StreamBatches(stream, shape, read, self._columns, shards=False)
            batches.left_out = self._find_unreadable(dataset, batches.rows())
            return _batch_loader(batches, **options)
        rows = DatasetRows(self._select_columns(dataset))
        read = partial(self._read, completions=completions, rows=rows)
        unreadable = self._find_unreadable(dataset, map(rows.__getitem__, range(len(rows))))
        numbers: Any = [number for number in range(len(rows)) if number not in unreadable]
        collate = options.pop("collate_fn", _unchanged)
        loader = DataLoader(
            numbers,
            size,
            sampler=sampler(numbers),
            collate_fn=lambda keys: collate(RowBatch(keys, read)),
            drop_last=args.dataloader_drop_last,
        )
        return accelerator.prepare_data_loader(loader, device_placement=False)

    def left_out(self, dataset: Dataset) -> dict[int, str]:
        """Rows that the last loader of a dataset to evaluate leaves out, and why."""
        return self._unreadable.get(dataset, {})

    def draw(self, n: int) -> RowBatch:
        """This rank's next `n` rows for additional completions, whose endless order is independent of the batches."""
        assert self._extra is not None
        ranks, rank, start = self._accelerator.num_processes, self._accelerator.process_index, self._n_extra
        self._n_extra += ranks * n
        numbers = self._extra.row_indices(start + rank * n, n)
        self._coming_extra = self._extra.row_indices(start + (ranks + rank) * n, n)
        return RowBatch([number for number in numbers for _ in range(self._completions)], self._read_training)

    # Batches of the run, counted from its first one

    @property
    def _steps(self) -> tuple[int, int]:
        return self._state().max_steps, self._args.gradient_accumulation_steps

    def batch_indices(self, start: int, n: int) -> range:
        """The indices of at most `n` batches of the run."""
        return self._batches.batch_indices(start, n, *self._steps)

    def batch(self, batch_index: int) -> tuple[RowBatch, int]:
        """A batch, also before the loader yields it, and the optimizer step at which it is used."""
        return self._batches.batch(batch_index), self._batches.step(
            batch_index, self._args.gradient_accumulation_steps
        )

    def restore_batches(self, keys: dict[int, list[int]]) -> None:
        """Takes the rows of batches from a checkpoint, where others may take the place of some since."""
        self._batches.checkpoint_keys = keys

    def without_prompts(self, rows: Sequence[dict[str, Any]]) -> list[EncodedRow]:
        """Rows that come from no loader, not encoded yet."""
        return self._complete([_Read(Row(getattr(row, "row_index", i), dict(row))) for i, row in enumerate(rows)])

    def _select_columns(self, dataset: Dataset) -> Dataset:
        if self._columns is None:
            return dataset
        return dataset.remove_columns([name for name in dataset.column_names if name not in self._columns])

    def _check_whole_groups(self, shape: BatchShape) -> None:
        if unreadable_rows(self._args.on_media_error).action == "skip" and shape.size % shape.completions != 0:
            raise ValueError(
                "With `on_media_error='skip'` and a stream, a rank replaces a row that can't be read by one of its "
                f"earlier rows, so it must have whole groups: make `per_device_train_batch_size` * "
                f"`steps_per_generation` ({shape.size}) a multiple of `num_generations` ({shape.completions})."
            )

    # Rows

    def _read_training(self, batch: RowBatch) -> list[EncodedRow]:
        read = self._read(batch, self._completions, self._rows, training=True)
        self._has_prompts = self._has_prompts or any(each.prompt is not None for each in read)
        if self._pool is not None and self._has_prompts:
            if batch.batch_index is not None:
                self._coming = self._batches.coming(batch.batch_index, self._n_prefetch, *self._steps)
            self._pool.want([*self._coming_extra, *self._coming])
        return read

    def _read(
        self, batch: RowBatch, completions: int, rows: DatasetRows | None, training: bool = False
    ) -> list[EncodedRow]:
        """Reads the row of each group once. In training, replaces rows that can't be read."""
        first = self._accelerator.process_index * len(batch)  # a group may straddle ranks
        numbers = [*map(_number, batch.keys)]
        begins = [i == 0 or (first + i) % completions == 0 or numbers[i] != numbers[i - 1] for i in range(len(batch))]
        skips, lost = self._skips if training else (), dict[int, str]()
        read: dict[int, _Read] = {}  # by the place at which a group begins
        while True:
            failed: dict[int, str] = {}
            if training:
                failed, self._lost = self._lost, failed
            for i in (i for i in range(len(batch)) if begins[i]):
                key = self._replacement(batch.keys[i], lost) if training else batch.keys[i]
                if i in read and read[i].row.row_index == _number(key):
                    continue
                try:
                    read[i] = self._take(key, rows, training)
                except skips as error:
                    failed[_number(key)] = str(error)
            if skips:
                failed = self._skip(failed, self.skipped, len(rows or range(_STREAM_LENGTH)), "train")
                lost |= failed
            if not failed:
                break
        if skips:
            self._metrics["train"]["media/skipped"].append(float(len(lost)))
        groups = self._complete([read[i] for i in sorted(read)])
        return [groups[group - 1] for group in accumulate(begins)]

    def _patience(self, row: Row) -> float:
        """Seconds that the media of a row may take, each a download, to be unpacked and to be decoded."""
        with suppress(MediaError):
            media = rows_to_messages([row], self._args.ignored_media_columns or (), rules=self._args.rules)
            return 3 * self._args.rules.media_timeout * max(sum(1 for _ in iter_refs(media)), 1)
        return 3 * self._args.rules.media_timeout

    def _take(self, key: Any, rows: DatasetRows | None, training: bool) -> "_Read":
        if training and self._pool is not None and self._has_prompts:
            read = self._pool.take(key)
        else:
            read = self._encoded(key if rows is None else rows[key])
        for prompt, decoded in ((read.prompt, read.decoded), (read.teachers, read.teachers_decoded)):
            if decoded:
                prompt.decoded = decoded  # which isn't pickled with it
        if training:
            self._last_row = read.row
        return read

    def _encoded(self, row: Row) -> "_Read":
        if self._encode is None:
            return _Read(row)
        if self._messages is None:
            prompt, messages = self._encode(row), None
        else:
            (messages,) = self._messages([row])
            prompt = self._encode(row, messages)
        teachers = None if self._encode_teachers is None else self._encode_teachers(row)
        decoded = (getattr(each, "decoded", ()) for each in (prompt, teachers))
        return _Read(row, prompt, next(decoded), messages, teachers, next(decoded))

    def _complete(self, read: "list[_Read]") -> list[EncodedRow]:
        columns = restore_rows([each.row for each in read], self._args.rules)
        return [
            EncodedRow(each.row.row_index, restored, each.row, placed, each.prompt, each.teachers)
            for each, restored, placed in zip(read, columns, self._placed(read), strict=True)
        ]

    def _placed(self, read: "list[_Read]") -> list[Any]:
        """The messages of rows in one format, which the media of one of them determine."""
        messages = [each.messages for each in read]
        formats = {(each.prompt is None, type(each.messages)) for each in read}
        if self._messages is None or (len(formats) == 1 and messages[0] is not None):
            return messages
        others = [i for i, each in enumerate(read) if each.prompt is None or each.messages is None]
        known = [each.row for each in read if each.prompt is not None and each.messages is not None][:1]
        made = self._messages([*known, *(read[i].row for i in others)])[len(known) :]
        for i, each in zip(others, made, strict=True):
            messages[i] = each
        return messages

    # Rows that can't be read

    def _replacement(self, key: Any, lost: Collection[int]) -> Any:
        if self._rows is not None:
            return other_row(key, self.skipped, len(self._rows), self._args.seed)
        return self._last_row if key.row_index in lost else key  # whose numbers may be others' in another epoch

    def _from_first(self, rows: Iterator[Row]) -> Iterator[Row]:
        """A stream's rows of an epoch from the first on that can take the place of skipped ones."""
        for row in islice(rows, _STREAM_LENGTH if self._skips else 0):
            try:
                self._encoded(row)
            except self._skips as error:
                self._lost[row.row_index] = str(error)
            else:
                self._last_row = row
                yield row
                break
        else:
            if self._lost:
                raise MediaError(_NONE_LEFT + [*self._lost.values()][-1])
        yield from rows

    def _skip(self, failed: dict[int, str], skipped: dict[int, str], n_rows: int, split: str) -> dict[int, str]:
        """Notes rows that failed, of the so many of a split. All that did, on any rank."""
        failures, file = dict(gather_object(list(failed.items()))), Path(self._args.output_dir, SKIPPED_ROWS)
        new = dict(sorted(failures.items() - skipped.items()))
        skipped.update(failures)
        if new and self._accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                for row, error in new.items():
                    entry = {"step": self._state().global_step, "split": split, "row": row, "error": error}
                    lines.write(json.dumps(entry) + "\n")
        rule = unreadable_rows(self._args.on_media_error)
        if rule.action == "raise":
            if failures:
                logger.warning_once(_DROPPED)
        elif len(skipped) > rule.limit(n_rows):
            raise MediaError(
                f"{len(skipped)} rows can't be read, more than `max_rows` ({rule.max_rows:g}) of `on_media_error` "
                f"allows; they are listed in {file}. The last one: {list(skipped.values())[-1]}"
            )
        return failures

    def _find_unreadable(self, dataset: Any, rows: Iterable[Row]) -> dict[int, str]:
        """The rows to evaluate that can't be read: once per dataset, all are read, each on one rank."""
        if not self._skips or self._encode is None:
            return {}
        if dataset not in self._unreadable:
            failed: dict[int, str] = {}
            unreadable: dict[int, str] = {}
            n_rows = 0
            for n_rows, row in enumerate(rows, start=1):
                if n_rows % self._accelerator.num_processes == self._accelerator.process_index:
                    try:
                        self._encoded(row)
                    except self._skips as error:
                        failed[row.row_index] = str(error)
            self._skip(failed, unreadable, n_rows, "eval")
            if unreadable and len(unreadable) == n_rows:
                raise MediaError(f"No row to evaluate can be read. The last one: {list(unreadable.values())[-1]}")
            self._unreadable[dataset] = unreadable
        self._metrics["eval"]["media/skipped"] = [float(len(self._unreadable[dataset]))]
        return self._unreadable[dataset]


class _Unindexed:
    """The dataset of a loader whose batch sampler makes the batches."""

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
    loader.set_epoch = batches.set_epoch  # which `Trainer` looks for in the loader alone before transformers 5.17
    return loader


def _unchanged(batch: Any) -> Any:
    return batch


def _number(key: Any) -> int:
    return getattr(key, "row_index", key)


def named_dataset(datasets: Any, dataset: Any) -> Any:
    """The dataset that `get_eval_dataloader` is called with: itself, or by its name among the trainer's."""
    dataset = datasets if dataset is None else datasets[dataset] if isinstance(dataset, str) else dataset
    if dataset is None:
        raise ValueError("There is no dataset to evaluate; pass `eval_dataset` to the trainer or to `evaluate`.")
    return dataset


def warn_of_positions(prompts: Sequence[EncodedPrompt], numbers: Sequence[int], model: PreTrainedModel) -> bool:
    """Warns of the first row that is longer than the model was trained for. Whether it did."""
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


def other_row(row: int, skipped: Mapping[int, str], n_rows: int, seed: int) -> int:
    """The replacement of a row, the same on all ranks that skip the same rows."""
    if row not in skipped:
        return row
    if len(skipped) >= n_rows:
        raise MediaError(_NONE_LEFT + [*skipped.values()][-1])
    drawn = (random.Random(f"{seed} {row} {attempt}").randrange(n_rows) for attempt in count())
    return next(each for each in drawn if each not in skipped)
