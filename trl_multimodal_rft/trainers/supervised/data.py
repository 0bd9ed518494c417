# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dataset checks and collator of supervised training."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset
from jinja2 import Environment
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import get_dataset_column_names, maybe_convert_to_chatml

from ...data.reading.refs import OverlongRow
from ...data.rows.batches import DatasetRows, Row
from ...data.rows.cells import Cell, cell_value
from ...data.rows.columns import has_media
from ...data.rows.names import MEDIA_COLUMNS, other_layout, prepare_remedy
from ...data.rows.unread import lists_columns
from ...encoding.concatenated import PART_LENGTHS, encode_concatenated
from ...encoding.processors import checked_texts
from ...encoding.prompts import check_ids, placeholder_tokens, plain_outputs
from ...encoding.sequences import SupervisedSequence
from ...encoding.supervised import SupervisedEncoder
from ...encoding.tokenized import row_labels
from ...rollout.stream import EncodedRow
from ..shared.dataset_checks import check_takes_media


logger = get_logger(__name__)

# Names that a row's `chat_template_kwargs` can't have: `messages`, and arguments of `apply_chat_template` except
# `documents`
_TEMPLATE_CALLS = (ProcessorMixin.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template)
_RESERVED_NAMES = {"messages"}.union(*(signature(call).parameters for call in _TEMPLATE_CALLS)) - {"documents"}


_MESSAGE_COLUMNS = ("prompt", "completion", "messages", "chosen", "rejected")


@dataclass
class SupervisedCollator:
    """Collator that encodes whole rows with their media, and pads the labels of a micro-batch."""

    model: PreTrainedModel
    processing_class: ProcessorMixin | PreTrainedTokenizerBase
    args: Any
    formatting_func: Callable[[dict], str] | None = None
    _token_names: ClassVar[tuple[str, ...]] = ("input_ids", "labels")  # TRL's columns of tokens

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
        """
        Returns a micro-batch of encoded rows.

        Args:
            rows (`Sequence`):
                Rows of a dataset, or [`~rollout.stream.EncodedRow`]s.

        Returns:
            `dict`: `sequences` ([`~encoding.sequences.SupervisedSequence`]), and `labels`, `(B, P)`, which are -100
            on tokens that aren't learned. `plain(load, i)` encodes row `i` with the processor that `load()` returns,
            for the self-check.
        """
        sequences: list[SupervisedSequence] = []
        stored: list[Row] = []
        for encoded, row in zip(self._encoded_rows(rows), self._stored_rows(rows), strict=True):
            parts = encoded if isinstance(encoded, list) else [encoded]
            sequences += parts
            stored += [row] * len(parts)
        labels = [sequence.input_ids.masked_fill(~sequence.learned, -100) for sequence in sequences]
        return {
            "sequences": sequences,
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            "plain": lambda load, i: self._plain_outputs(stored[i], load()),
        }

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

    def encode(self, row: Row) -> Any:
        """
        Returns a row as a sequence, of text cut to `max_length` tokens, or a concatenated row as a list of sequences.
        Raises `OverlongRow` if no learned token is left.
        """
        if row.get(PART_LENGTHS):
            sequences = encode_concatenated(self.encoder, row)
            for sequence in sequences:
                check_ids(sequence.input_ids, self.model.config, row.row_index)
            return sequences
        return self._cut(self._encode_whole(row))

    def _encode_whole(self, row: Row) -> SupervisedSequence:
        args = self.args
        if row.get("input_ids"):
            sequence = self.encoder.encode_tokens(row, args.completion_only_loss)
        elif self.formatting_func is not None:
            sequence = self.encoder.encode_text(self.formatting_func(row), row.row_index)
        elif args.dataset_text_field in row and not row.keys() & {"prompt", "messages"}:
            sequence = self.encoder.encode_text(row[args.dataset_text_field], row.row_index)
        else:
            sequence = self._encoder_of(row).encode_sequence(row, args.completion_only_loss, args.assistant_only_loss)
        check_ids(sequence.input_ids, self.model.config, row.row_index)
        return sequence

    def _cut(self, sequence: SupervisedSequence) -> SupervisedSequence:
        args = self.args
        n_tokens = len(sequence)
        if args.max_length is None or n_tokens <= args.max_length or sequence.modalities:
            return sequence
        sequence = sequence.cut(args.max_length, from_end=args.truncation_mode == "keep_end")
        if not sequence.learned[1:].any():
            raise OverlongRow(
                f"row {sequence.row} has {n_tokens} tokens, of which `max_length` ({args.max_length}) leaves none to "
                "learn; raise `max_length`, or make the prompt shorter"
            )
        return sequence

    def _encoder_of(self, row: Row) -> SupervisedEncoder:
        template_kwargs = {"chat_template": self.chat_template, **self._template_variables(row)}
        return replace(self.encoder, template_kwargs=template_kwargs)

    def _template_variables(self, row: Row) -> dict[str, Any]:
        """Returns the tools of a row, and the entries of its `chat_template_kwargs` that the chat template reads."""
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        variables = row.get("chat_template_kwargs") or {}
        variables = {name: value for name, value in variables.items() if value is not None}
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

    @cached_property
    def _template_names(self) -> set[str]:
        template = self.chat_template or getattr(self.processing_class, "chat_template", None) or ""
        sources = template.values() if isinstance(template, dict) else [template]
        tokens = chain.from_iterable(map(Environment().lex, sources))
        return {name for _, token_type, name in tokens if token_type == "name"}

    @cached_property
    def chat_template(self) -> str | None:
        """TRL's training template for `assistant_only_loss`, or `None` for the model's own template."""
        if not self.args.assistant_only_loss:
            return None
        try:
            return get_training_chat_template(self.processing_class)
        except ValueError:  # unknown to TRL
            return None

    def may_drop(self, row: Row) -> bool:
        """
        Returns whether `max_length` may leave nothing of a row, or `False` if its text is too short for that, or if it
        has media.
        """
        if self.args.max_length is None or row.get(PART_LENGTHS) or self._has_media(row):
            return False
        # A token of text has a byte or more. The other half is for what a chat template adds
        return self.formatting_func is not None or 2 * _n_bytes(dict(row)) > self.args.max_length

    def token_columns(self, row: Row) -> dict[str, list[int]]:
        """Returns TRL's columns of tokens of a row, none for a concatenated row, which has them, or with media."""
        return {} if row.get(PART_LENGTHS) or self._has_media(row) else self._token_columns(row)

    def token_names(self, dataset: Dataset) -> list[str]:
        """Returns the names of the columns of tokens that a dataset lacks, none for a dataset with media columns."""
        columns = {*dataset.column_names}
        return [] if columns & self._media_columns else [name for name in self._token_names if name not in columns]

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        return self.tokens(row)

    def tokens(self, row: Row, cut: bool = True) -> dict[str, list[int]]:
        """Returns the tokens and labels of a row of text, without `cut` beyond `max_length`. See [`encode`]."""
        sequence = self._encode_whole(row)
        sequence = self._cut(sequence) if cut else sequence
        labels = sequence.input_ids.masked_fill(~sequence.learned, -100)
        return {"input_ids": sequence.input_ids.tolist(), "labels": labels.tolist()}

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
        Returns a dataset, or a dictionary of datasets, that the collator can encode.

        As in TRL, drops tokenized rows that lose all labels to `max_length`, and converts `conversations` to
        `messages`. `name` is the split, for error messages.
        """
        if isinstance(dataset, dict):
            return {split: self.prepare(split_dataset, split) for split, split_dataset in dataset.items()}
        return None if dataset is None else self._prepare(dataset, name)

    def _prepare(self, dataset: Any, name: str) -> Any:
        args = self.args
        formatting_func = self.formatting_func
        columns, media = self._columns_of(dataset, name)
        if formatting_func is not None and args.completion_only_loss:
            raise ValueError(
                "`formatting_func` writes a row as one text, which has no completion; drop `completion_only_loss`."
            )
        if formatting_func is None and "input_ids" not in columns:
            if columns & {"prompt", "messages"}:
                return dataset
            if "conversations" in columns:
                return dataset.map(maybe_convert_to_chatml, remove_columns="conversations")
            if isinstance(dataset, Dataset) and not lists_columns(dataset):
                return dataset  # the dataset's transform may return other columns
            if args.dataset_text_field not in columns:
                layout = other_layout(dataset.features or dict.fromkeys(columns))
                text_column = f"`{args.dataset_text_field}` (`dataset_text_field`)"
                raise missing_columns_error(
                    name, columns, f"`prompt` and `completion`, `messages`, `input_ids` or {text_column}", layout
                )
        if media:
            raise ValueError(
                f"The {name} dataset has plain text and media ({media}), and nothing says where in the text they are; "
                "give `prompt` and `completion`, or `messages`, or ignore the media by `ignored_media_columns`."
            )
        if "input_ids" in columns:
            return _with_labels(dataset, name, columns, args)
        if args.assistant_only_loss:
            raise ValueError(
                f"`assistant_only_loss=True` needs `messages`, but the {name} dataset has plain text; set it to False."
            )
        return dataset

    def _columns_of(self, dataset: Any, name: str) -> tuple[set[str], list[str]]:
        """Returns columns, and those of media. Raises an error if a tokenizer gets media."""
        columns = set(get_dataset_column_names(dataset))
        media = sorted(columns & MEDIA_COLUMNS.keys() - set(self.args.ignored_media_columns or ()))
        if media:
            check_takes_media(self.processing_class, self.args.ignored_media_columns, dataset)
            keeps_end = getattr(self.args, "truncation_mode", None) == "keep_end"
            if keeps_end and self.args.max_length is not None:
                raise ValueError(
                    "truncation_mode='keep_end' is not supported for vision-language models, or others whose rows "
                    f"have media ({media}) and are never cut; use 'keep_start', or set `max_length=None`."
                )
        return columns, media


def _n_bytes(value: Cell | tuple) -> int:
    """Returns the number of bytes of all texts in a value, and of the numbers in its lists, which may be tokens."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, dict):
        return sum(_n_bytes(key) + _n_bytes(item) for key, item in value.items())
    if isinstance(value, np.ndarray):
        return value.size
    return sum(map(_n_bytes, value)) if isinstance(value, (list, tuple)) else 1


def missing_columns_error(name: str, columns: set[str], needed: str, layout: str | None) -> ValueError:
    """Returns the error for a dataset without the needed columns. `layout` is another tool's layout that fits it."""
    question = next((column for column in ("question", "problem", "instruction", "query") if column in columns), None)
    rename = "" if question is None or "prompt" in columns else f"rename {question!r} to 'prompt', or "
    remedy = "" if layout is None else f"; {rename}{prepare_remedy(layout)}"
    return ValueError(f"The {name} dataset has the columns {sorted(columns)}; it needs {needed}{remedy}.")


def packs(args: Any, split: str) -> bool:
    """Returns whether the rows of a split are packed."""
    return args.packing if split == "train" or args.eval_packing is None else args.eval_packing


def splits_rows(args: Any, split: str) -> bool:
    """Returns whether long rows of a split are split between concatenated rows. They are cut otherwise."""
    return packs(args, split) and args.packing_strategy != "bfd"


def _with_labels(dataset: Any, name: str, columns: set[str], args: Any) -> Any:
    """Returns a tokenized dataset without rows that lose all labels to `max_length`. Raises for ambiguous labels."""
    if "completion_mask" in columns and "labels" not in columns and args.completion_only_loss is None:
        raise ValueError(
            f"The {name} dataset has `completion_mask` and no `labels`; set `completion_only_loss` to say whether "
            "only completions are learned."
        )
    # Rows of streams and of datasets with a transform are dropped when they are read
    has_columns = isinstance(dataset, Dataset) and lists_columns(dataset)
    is_whole = PART_LENGTHS in columns or splits_rows(args, name)
    if (
        not has_columns
        or is_whole
        or args.max_length is None
        or not columns & {"labels", "completion_mask", "assistant_masks"}
    ):
        return dataset
    window = slice(args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
    completion_only = args.completion_only_loss
    remaining = dataset.filter(lambda row: any(label != -100 for label in row_labels(row, completion_only)[window]))
    n_dropped = len(dataset) - len(remaining)
    if n_dropped:
        logger.warning(f"{n_dropped} rows of the {name} dataset are dropped: `max_length` leaves nothing to learn.")
    return remaining
