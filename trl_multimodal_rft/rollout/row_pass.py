# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A pass over all rows of a run's datasets, without their media, before the first step and beside the next ones."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.sources import check_reachable
from ..data.rows.batches import Row
from ..data.rows.features import outlined_rows, table_order
from ..data.rows.prefetch import PrefetchPool
from ..data.rows.rendered import RenderedPrompt
from ..data.rows.unread import lists_columns
from ..modalities import MODALITIES
from .stream import skip_limit


logger = get_logger(__name__)

_FIRST_SECONDS = 5.0  # seconds of reading before the first step; the other rows are read beside the next steps
_ROWS_PER_PART = 500
_N_SHOWN = 5  # errors whose texts are shown

# What transformers passes to callbacks
_EventPart = PreTrainedModel | DataLoader | None
# Datasets of an argument, and a function that returns the messages of a row as its encoder reads them, without media
Datasets = Dataset | IterableDataset | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
ReadRow = Callable[[Row], str | list | RenderedPrompt | None]


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
    Reads all rows of datasets, without their media, and looks whether files are there: for some seconds before the
    first step, a share on each rank, then by a process beside the next steps. `readers` gives, by argument, datasets
    and the function that reads a row. Not of streams, transforms and formats.
    """

    def __init__(self, accelerator: Accelerator, readers: Callable[[], Mapping[str, tuple[Datasets, ReadRow]]]):
        self._accelerator = accelerator
        self._readers = readers
        self._skips = False
        self._max_skipped_rows = 0.0
        self._parts: list[_Part] = []
        self._n_rows: dict[str, int] = {}
        self._findings = _Findings()
        self._pool: PrefetchPool[_Findings] | None = None
        self._next = 0  # index of the next part that this rank reads
        self._goes_on = False  # whether a rank still reads rows

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **parts: _EventPart):
        self.begin(args.on_media_error == "skip", args.max_skipped_rows)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: _EventPart):
        self.go_on()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: _EventPart):
        self.close()

    def begin(self, skips: bool, max_skipped_rows: float) -> None:
        """
        Reads rows for some seconds. Raises the errors that all ranks have found, unless the run `skips` these rows,
        see [`skip_limit`].
        """
        self._skips = skips
        self._max_skipped_rows = max_skipped_rows
        self._n_rows = {}
        self._parts = [*self._parts_of_rank()]
        self._findings = _Findings()
        self._next = 0
        self._goes_on = False  # an earlier run may have ended while it read rows
        end = time.monotonic() + (_FIRST_SECONDS if sys.platform == "linux" else math.inf)  # the pool forks
        while self._next < len(self._parts) and time.monotonic() < end:
            self._findings.add(self._read_part(self._next))
            self._next += 1
        self._share()
        if self._next < len(self._parts):
            self._pool = PrefetchPool(self._read_part)
            self._pool.prefetch(range(self._next, len(self._parts)))

    def go_on(self) -> None:
        """Raises the errors of the rows that were left, once all ranks have read theirs. All ranks must call this."""
        if not self._goes_on:
            return
        while self._pool is not None and self._next < len(self._parts) and self._pool.is_read(self._next):
            self._findings.add(self._pool.take(self._next))
            self._next += 1
        self._share()

    def _share(self) -> None:
        """Reports what ranks have found, at the start and when all rows are read."""
        starts = not self._goes_on
        self._goes_on = any(gather_object([self._next < len(self._parts)]))
        if self._goes_on and not starts:
            return
        for findings in gather_object([self._findings]):
            self._findings.add(findings)
        if not self._goes_on:
            self.close()
        self._report()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _parts_of_rank(self) -> Iterator["_Part"]:
        n_ranks = self._accelerator.num_processes
        for argument, (datasets, read) in self._readers().items():
            for name, dataset in named_splits({argument: datasets}):
                is_plain = isinstance(dataset, Dataset) and lists_columns(dataset) and dataset.format["type"] is None
                if not is_plain and not isinstance(dataset, list):
                    continue
                self._n_rows[name] = len(dataset)
                order = table_order(dataset) if isinstance(dataset, Dataset) else np.arange(len(dataset))
                for i, start in enumerate(range(0, len(dataset), _ROWS_PER_PART)):
                    if i % n_ranks == self._accelerator.process_index:
                        yield _Part(name, dataset, read, order[start : start + _ROWS_PER_PART])

    def _read_part(self, index: int) -> _Findings:
        part = self._parts[index]
        findings = _Findings()
        for row in part.rows():
            key = part.name, row.row_index
            try:
                prompt = part.read(row)
                messages = prompt.messages if isinstance(prompt, RenderedPrompt) else prompt
                refs = [ref for ref in iter_refs(messages) if ref.source is not None]
                for ref in refs:
                    check_reachable(ref)
            except ValueError as error:
                findings.errors[key] = str(error)
                if not isinstance(error, MediaError):
                    findings.unskipped.add(key)
                continue
            lacked = [name for name in MODALITIES if name not in {ref.modality for ref in refs}]
            tags = [f"<{name}>" for name in lacked if _has_tag(messages, f"<{name}>")]
            if tags:
                findings.tags[key] = tags[0]
        return findings

    def _report(self) -> None:
        findings = self._findings
        for name, n_rows in self._n_rows.items():
            errors = {index: text for (dataset, index), text in sorted(findings.errors.items()) if dataset == name}
            tags = {index: tag for (dataset, index), tag in sorted(findings.tags.items()) if dataset == name}
            if tags:
                first = min(tags)
                logger.warning_once(
                    f"{name}: {_count(len(tags), n_rows)} a tag in the text and no such medium, the first is row "
                    f"{first} with {tags[first]!r}; the model reads the letters. Add the media, or remove the tags."
                )
            if not errors:
                continue
            is_media_error = not any((name, index) in findings.unskipped for index in errors)
            is_skipped = self._skips and is_media_error
            shown = " | ".join([*errors.values()][:_N_SHOWN])
            rest = f" | and {len(errors) - _N_SHOWN} more" * (len(errors) > _N_SHOWN)
            if is_skipped and len(errors) <= skip_limit(self._max_skipped_rows, n_rows):
                logger.warning_once(
                    f"{name}: {_count(len(errors), n_rows)} errors and will be left out: {shown}{rest}"
                )
                continue
            limit = f", more than `max_skipped_rows` ({self._max_skipped_rows:g}) allows" if is_skipped else ""
            many = f"{_count(len(errors), n_rows)} errors{limit}: " if len(errors) > 1 or limit else ""
            raise (MediaError if is_media_error else ValueError)(f"{name}: {many}{shown}{rest}")


@dataclass(frozen=True)
class _Part:
    """Rows that are read at a time."""

    name: str
    dataset: Dataset | list[dict[str, Any]]
    read: ReadRow
    indices: np.ndarray

    def rows(self) -> Iterator[Row]:
        dataset = self.dataset
        if isinstance(dataset, Dataset):
            rows = outlined_rows(dataset, dataset.format["columns"], self.indices)
        else:
            rows = ((i, dict(dataset[i])) for i in self.indices.tolist())
        for index, row in rows:
            yield Row(index, row)


def named_splits(datasets: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each dataset with its name in messages. An entry is a dataset, a dictionary of them, or `None`."""
    for argument, entry in datasets.items():
        splits = entry if isinstance(entry, dict) else {None: entry}
        for split, dataset in splits.items():
            if dataset is not None:
                yield f"`{argument}`" if split is None else f"`{argument}[{split!r}]`", dataset


def _has_tag(messages: str | list | dict | None, tag: str) -> bool:
    """Returns whether a text of messages, or of prompts, has a tag. Answers and results of tools aren't asked."""
    if isinstance(messages, str):
        return tag in messages
    if isinstance(messages, dict):
        content = messages.get("content")
        blocks = content if isinstance(content, list) else [{"text": content}]
        is_asked = messages.get("role") not in ("assistant", "tool")
        return is_asked and any(tag in str(block.get("text", "")) for block in blocks)
    return isinstance(messages, list) and any(_has_tag(item, tag) for item in messages)


def _count(n: int, n_rows: int) -> str:
    return f"{n:,} of {n_rows:,} rows {'has' if n == 1 else 'have'}"
