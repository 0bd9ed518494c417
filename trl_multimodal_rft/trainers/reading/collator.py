# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the collators of all trainers that read completions share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import get_dataset_column_names

from ...data.rows.batches import DatasetRows, Row
from ...data.rows.cells import Cell, cell_value
from ...data.rows.columns import has_media
from ...data.rows.labels import with_class_names
from ...data.rows.names import MEDIA_COLUMNS, TEXT_COLUMNS, prepare_remedy
from ...encoding.concatenated import PART_LENGTHS
from ...encoding.messages import template_names, template_variables
from ...encoding.processors import checked_texts
from ...encoding.prompts import placeholder_tokens, plain_outputs
from ...encoding.supervised import SupervisedEncoder
from ...rollout.stream import EncodedRow
from ..base.configs import ReadingConfig
from ..base.dataset_checks import check_takes_media


# Names that a row's `chat_template_kwargs` can't have: `messages`, and arguments of `apply_chat_template` except
# `documents`
_TEMPLATE_CALLS = (ProcessorMixin.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template)
_RESERVED_NAMES = {"messages"}.union(*(signature(call).parameters for call in _TEMPLATE_CALLS)) - {"documents"}


_MESSAGE_COLUMNS = ("prompt", "completion", "messages", "chosen", "rejected")


ConfigT = TypeVar("ConfigT", bound="ReadingConfig")


@dataclass
class RowCollator(Generic[ConfigT]):
    """Collator that encodes rows with their media. A subclass says what a row becomes, and a micro-batch."""

    model: PreTrainedModel
    processing_class: ProcessorMixin | PreTrainedTokenizerBase
    args: ConfigT
    _token_names: ClassVar[tuple[str, ...]]  # TRL's columns of tokens
    chat_template: ClassVar[str | None] = None  # `None` is the model's own template

    def __post_init__(self):
        self.encoder = SupervisedEncoder(
            self.processing_class,
            self.model,
            audio_overlong=self.args.audio_overlong,
            ignored_media_columns=self.args.ignored_media_columns or (),
            placeholders=placeholder_tokens(self.model, self.processing_class),
            media_rules=self.args.rules,
            special_tokens_in_text=self.args.special_tokens_in_text,
        )

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Returns a micro-batch of rows of a dataset, or of [`~rollout.stream.EncodedRow`]s."""
        raise NotImplementedError

    def encode(self, row: Row) -> Any:
        """Returns a row as it is forwarded. Raises `OverlongRow` if `max_length` leaves nothing of it to learn."""
        raise NotImplementedError

    def read(self, row: Row) -> list:
        """Returns the messages of a row, or several such lists, as `encode` reads them, without decoding media."""
        raise NotImplementedError

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        raise NotImplementedError

    def _prepare(self, dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
        raise NotImplementedError

    def _encoded_rows(self, rows: Sequence[Any]) -> list[Any]:
        """The stream has already encoded an `EncodedRow`; other rows are encoded here."""
        return [row.prompt if isinstance(row, EncodedRow) else self.encode(Row(i, row)) for i, row in enumerate(rows)]

    def _stored_rows(self, rows: Sequence[Any]) -> list[Row]:
        return [row.stored if isinstance(row, EncodedRow) else Row(i, row) for i, row in enumerate(rows)]

    def conversation(self, row: Row, answer: str | None = None) -> str | list:
        """See [`~encoding.supervised.SupervisedEncoder.conversation`]."""
        return self._encoder_of(row).conversation(row, answer)

    def _plain_outputs(self, row: Row, processor: ProcessorMixin, answer: str | None = None) -> dict[str, Any]:
        defaults = {"chat_template": getattr(self.processing_class, "chat_template", None)}
        encoder = self._encoder_of(row)
        template_kwargs = defaults | {
            name: value for name, value in encoder.template_kwargs.items() if value is not None
        }
        return plain_outputs(encoder.conversation(row, answer), processor, self.args.audio_overlong, template_kwargs)

    def _encoder_of(self, row: Row) -> SupervisedEncoder:
        template_kwargs = {"chat_template": self.chat_template, **self._template_variables(row)}
        return replace(self.encoder, template_kwargs=template_kwargs)

    def _template_variables(self, row: Row) -> dict[str, Any]:
        """Returns the tools of a row, and the entries of its `chat_template_kwargs` that the chat template reads."""
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        variables = template_variables(row)
        reserved = sorted(_RESERVED_NAMES & variables.keys())
        if reserved:
            raise ValueError(
                f"row {row.row_index}, column 'chat_template_kwargs': {reserved} can't be set per row; set "
                "`processing_class.chat_template` for all rows, and give 'messages' and 'tools' as columns"
            )
        # Processors would take names that the template doesn't read, such as `images`, as their own arguments
        variables = {name: value for name, value in variables.items() if name in self._template_names}
        mode = self.args.special_tokens_in_text or "warn"

        def checked_value(value: Any, column: str) -> Any:
            return value and checked_texts(
                value, self.processing_class, mode, f"row {row.row_index}, column '{column}'"
            )

        return {"tools": checked_value(tools, "tools") or None, **checked_value(variables, "chat_template_kwargs")}

    @property
    def _keeps_end(self) -> bool:
        """Whether `max_length` keeps the end of a row. Some trainers have no such option."""
        return getattr(self.args, "truncation_mode", None) == "keep_end"

    @cached_property
    def _template_names(self) -> set[str]:
        return template_names(self.processing_class, {"chat_template": self.chat_template})

    def may_drop(self, row: Row) -> bool:
        """
        Returns whether `max_length` may leave nothing of a row, or `False` if its text is too short for that, or if it
        has media.
        """
        if self.args.max_length is None or row.get(PART_LENGTHS) or self._has_media(row):
            return False
        # A token of text has a byte or more. The other half is for what a chat template adds
        return 2 * _n_bytes(dict(row)) > self.args.max_length

    def token_columns(self, row: Row) -> dict[str, list[int]]:
        """Returns TRL's columns of tokens of a row, none for a concatenated row, which has them, or with media."""
        return {} if row.get(PART_LENGTHS) or self._has_media(row) else self._token_columns(row)

    def token_names(self, dataset: Dataset) -> list[str]:
        """Returns the names of the columns of tokens that a dataset lacks, none for a dataset with media columns."""
        columns = {*dataset.column_names}
        return [] if columns & self._media_columns else [name for name in self._token_names if name not in columns]

    def holds_text_alone(self, dataset: Dataset) -> bool:
        """Returns whether no row of a dataset has media."""
        columns = {*dataset.column_names}
        if columns & self._media_columns:
            return False
        messages = sorted(columns & {*_MESSAGE_COLUMNS})  # which may hold media in their blocks
        if not messages:
            return True
        rows = DatasetRows(dataset.select_columns(messages))
        return not any(self._has_media(rows[index]) for index in range(len(rows)))

    def _has_media(self, row: Row) -> bool:
        is_filled = (cell_value(row.get(name)) is not None for name in self._media_columns)
        return any(is_filled) or any(
            has_media(row[name]) for name in _MESSAGE_COLUMNS if isinstance(row.get(name), list)
        )

    @cached_property
    def _media_columns(self) -> set[str]:
        return MEDIA_COLUMNS.keys() - set(self.args.ignored_media_columns or ())

    def prepare(self, dataset: Any, name: str) -> Any:
        """
        Returns a dataset, or a dictionary of datasets, that the collator can encode: as in TRL, without tokenized rows
        that lose all labels to `max_length`, and with `conversations` as `messages`. `name` is the split, for errors.
        """
        if isinstance(dataset, dict):
            return {split: self.prepare(split_dataset, split) for split, split_dataset in dataset.items()}
        return None if dataset is None else self._prepare(with_class_names(dataset, TEXT_COLUMNS), name)

    def _columns_of(self, dataset: Any, name: str) -> tuple[set[str], list[str]]:
        """Returns columns, and those of media. Raises an error if a tokenizer gets media."""
        columns = set(get_dataset_column_names(dataset))
        media = sorted(columns & MEDIA_COLUMNS.keys() - set(self.args.ignored_media_columns or ()))
        if media:
            check_takes_media(self.processing_class, self.args.ignored_media_columns, dataset)
            if self._keeps_end and self.args.max_length is not None:
                raise ValueError(
                    "truncation_mode='keep_end' is not supported for vision-language models, or others whose rows "
                    f"have media ({media}) and are never cut; use 'keep_start', or set `max_length=None`."
                )
        return columns, media


def missing_columns_error(name: str, columns: set[str], needed: str, layout: str | None) -> ValueError:
    """Returns the error for a dataset without the needed columns. `layout` is another tool's layout that fits it."""
    question = next((column for column in ("question", "problem", "instruction", "query") if column in columns), None)
    rename = "" if question is None or "prompt" in columns else f"rename {question!r} to 'prompt', or "
    remedy = "" if layout is None else f"; {rename}{prepare_remedy(layout)}"
    return ValueError(f"The {name} dataset has the columns {sorted(columns)}; it needs {needed}{remedy}.")


def _n_bytes(value: Cell | tuple) -> int:
    """Returns the number of bytes of all texts in a value, plus 1 for each other entry, which may be a token."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, dict):
        return sum(_n_bytes(key) + _n_bytes(item) for key, item in value.items())
    if isinstance(value, np.ndarray):
        return value.size
    return sum(map(_n_bytes, value)) if isinstance(value, (list, tuple)) else 1
