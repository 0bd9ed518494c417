# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A pass over all rows of a run's datasets, without their media, before the first step and beside the next ones."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.sources import check_reachable
from ..data.rows.batches import Row
from ..data.rows.columns import lacking_tag
from ..data.rows.features import outlined_rows
from ..data.rows.prefetch import PrefetchPool
from ..data.rows.unread import lists_columns
from ..families import MODALITIES
from .stream import UnreadableRows, unreadable_rows


logger = get_logger(__name__)

_FIRST_SECONDS = 10.0  # seconds of reading before the first step; the other rows are read beside the next steps
_ROWS_PER_PART = 500
_N_SHOWN = 5  # errors whose texts are shown

# Returns the messages of a row as its encoder reads them, without decoding media
ReadRow = Callable[[Row], Any]


@dataclass
class _Findings:
    """What is wrong with rows, by dataset and row index."""

    errors: dict[tuple[str, int], str] = field(default_factory=dict)
    unskipped: set[tuple[str, int]] = field(default_factory=set)  # errors for which rows aren't skipped
    tags: dict[tuple[str, int], str] = field(default_factory=dict)  # tags such as `<image>` of rows without media

    def add(self, other: "_Findings") -> None:
        self.errors |= other.errors
        self.unskipped |= other.unskipped
        self.tags |= other.tags


class RowPass(TrainerCallback):
    """
    Reads all rows of datasets as they are encoded, except for their media, and looks whether files are there.

    Rows are read for some seconds before the first step of training, or the first batch of an evaluation, by all
    ranks, each a share. A process reads the rows that are left during the next steps. Streams, and datasets with a
    transform, aren't read.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's accelerator.
        readers (`Callable`):
            Function that returns, by the name of an argument, the datasets and the function that reads a row of them.
    """

    def __init__(self, accelerator: Accelerator, readers: Callable[[], Mapping[str, tuple[Any, ReadRow]]]):
        self._accelerator = accelerator
        self._readers = readers
        self._parts: list[tuple[str, Any, ReadRow, range]] = []
        self._n_rows: dict[str, int] = {}
        self._findings = _Findings()
        self._pool: PrefetchPool | None = None
        self._settings = UnreadableRows()
        self._next = 0  # index of the next part that this rank reads

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.begin(unreadable_rows(args.on_media_error))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.go_on()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.close()

    def begin(self, settings: UnreadableRows) -> None:
        """
        Reads rows for some seconds. Raises the errors that all ranks have found, unless `settings` say that these rows
        are skipped.
        """
        self._settings = settings
        self._parts = [*self._parts_of_rank()]
        self._findings = _Findings()
        self._next = 0
        end = time.monotonic() + (_FIRST_SECONDS if sys.platform == "linux" else float("inf"))  # the pool forks
        while self._next < len(self._parts) and time.monotonic() < end:
            self._findings.add(self._read_part(self._next))
            self._next += 1
        for other, is_done in gather_object([(self._findings, self._next == len(self._parts))]):
            self._findings.add(other)
            if not is_done:
                logger.info("The other rows are read beside the first steps.")
        self._report()
        if self._next < len(self._parts):
            self._pool = PrefetchPool(self._read_part)
            self._pool.prefetch(range(self._next, len(self._parts)))

    def go_on(self) -> None:
        """Raises the errors of the rows that were left, once all of these are read."""
        if self._pool is None:
            return
        while self._next < len(self._parts) and self._pool.is_read(self._next):
            self._findings.add(self._pool.take(self._next))
            self._next += 1
        if self._next == len(self._parts):
            self.close()
            self._report()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _parts_of_rank(self) -> Iterator[tuple[str, Any, ReadRow, range]]:
        n_ranks = self._accelerator.num_processes
        for argument, (datasets, read) in self._readers().items():
            for name, dataset in named_splits({argument: datasets}):
                if not isinstance(dataset, (Dataset, list)) or not lists_columns(dataset):
                    continue
                self._n_rows[name] = len(dataset)
                for i, start in enumerate(range(0, len(dataset), _ROWS_PER_PART)):
                    if i % n_ranks == self._accelerator.process_index:
                        yield name, dataset, read, range(start, min(start + _ROWS_PER_PART, len(dataset)))

    def _read_part(self, index: int) -> _Findings:
        name, dataset, read, indices = self._parts[index]
        findings = _Findings()
        for row in _outlines(dataset, indices):
            key = name, row.row_index
            try:
                messages = read(row)
                refs = [ref for ref in iter_refs(messages) if ref.source is not None]
                for ref in refs:
                    check_reachable(ref)
            except ValueError as error:
                findings.errors[key] = str(error)
                if not isinstance(error, MediaError):
                    findings.unskipped.add(key)
                continue
            tags = [] if refs else [f"<{modality}>" for modality in MODALITIES if _has_tag(messages, modality)]
            if tags:
                findings.tags[key] = tags[0]
        return findings

    def _report(self) -> None:
        findings = self._findings
        self._findings = _Findings()
        settings = self._settings
        for name, n_rows in self._n_rows.items():
            errors = {index: text for (dataset, index), text in sorted(findings.errors.items()) if dataset == name}
            tags = {index: tag for (dataset, index), tag in sorted(findings.tags.items()) if dataset == name}
            if tags:
                first = min(tags)
                logger.warning(
                    f"{name}: {_count(len(tags), n_rows)} {tags[first]!r} in the text and no media, the first is row "
                    f"{first}; the model reads the letters. Add the media, or remove the tag."
                )
            if not errors:
                continue
            is_skipped = settings.action == "skip" and not any((name, index) in findings.unskipped for index in errors)
            shown = " | ".join([*errors.values()][:_N_SHOWN])
            rest = f" | and {len(errors) - _N_SHOWN} more" * (len(errors) > _N_SHOWN)
            if is_skipped and len(errors) <= settings.limit(n_rows):
                logger.warning(f"{name}: {_count(len(errors), n_rows)} errors and will be left out: {shown}{rest}")
                continue
            limit = f", more than `max_rows` ({settings.max_rows:g}) of `on_media_error` allows" if is_skipped else ""
            many = f"{_count(len(errors), n_rows)} errors{limit}: " if len(errors) > 1 or limit else ""
            is_media_error = not any((name, index) in findings.unskipped for index in errors)
            raise (MediaError if is_media_error else ValueError)(f"{name}: {many}{shown}{rest}")


def named_splits(datasets: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each dataset with its name in messages. An entry is a dataset, a dictionary of them, or `None`."""
    for argument, entry in datasets.items():
        splits = entry if isinstance(entry, dict) else {None: entry}
        for split, dataset in splits.items():
            if dataset is not None:
                yield f"`{argument}`" if split is None else f"`{argument}[{split!r}]`", dataset


def _outlines(dataset: Any, indices: range) -> Iterator[Row]:
    if not isinstance(dataset, Dataset):
        yield from (Row(i, dict(dataset[i])) for i in indices)
        return
    columns = dataset.format["columns"]
    for i, row in outlined_rows(dataset.with_format(None).select(indices), columns):
        yield Row(indices[i], row)


def _has_tag(messages: Any, modality: str) -> bool:
    """Returns whether a text of messages, or of prompts, has a tag of a modality."""
    if isinstance(messages, str):
        return f"<{modality}>" in messages
    if isinstance(messages, dict):
        return lacking_tag(messages, modality)
    return isinstance(messages, list) and any(_has_tag(item, modality) for item in messages)


def _count(n: int, n_rows: int) -> str:
    return f"{n:,} of {n_rows:,} rows {'has' if n == 1 else 'have'}"
