# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of supervised training: what a dataset must hold, and the collator that encodes it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from jinja2 import Environment
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import get_dataset_column_names, maybe_convert_to_chatml

from ..data.reading.refs import MediaError, OverlongRow
from ..data.rows.columns import MEDIA_COLUMNS
from ..data.rows.row import Row
from ..data.rows.unread import lists_columns, other_layout, prepared
from ..encoding.control_tokens import checked_texts
from ..encoding.prompts import check_ids, placeholder_tokens, plain_outputs
from ..encoding.supervised import SupervisedEncoder, SupervisedSequence, row_labels
from ..rollout.stream import EncodedRow
from .setup import check_takes_media


logger = get_logger(__name__)

# Arguments of `apply_chat_template`, and the variable it sets; `documents` are data
_TEMPLATE_CALLS = (ProcessorMixin.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template)
_ARGUMENTS = {"messages"}.union(*(signature(call).parameters for call in _TEMPLATE_CALLS)) - {"documents"}


@dataclass
class SupervisedCollator:
    """Encodes rows whole, with their media, and pads the labels of a micro-batch."""

    model: PreTrainedModel
    processing_class: ProcessorMixin | PreTrainedTokenizerBase
    args: Any
    formatting_func: Callable[[dict], str] | None = None

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
        A micro-batch.

        Args:
            rows (`Sequence`):
                Rows of a dataset, or [`~rollout.stream.EncodedRow`]s.

        Returns:
            `dict`: `sequences` ([`~encoding.supervised.SupervisedSequence`]); `labels`, `(B, P)`, -100 on tokens that
            aren't learned; and `plain`, which returns what a processor that it loads makes of one of the rows.
        """
        sequences, stored = self._encoded(rows), self._stored(rows)
        labels = [each.input_ids.masked_fill(~each.learned, -100) for each in sequences]
        return {
            "sequences": sequences,
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            "plain": lambda load, i: self._plain(stored[i], load()),
        }

    def _encoded(self, rows: Sequence[Any]) -> list[Any]:
        return [row.prompt if isinstance(row, EncodedRow) else self.encode(Row(i, row)) for i, row in enumerate(rows)]

    def _stored(self, rows: Sequence[Any]) -> list[Row]:
        return [row.stored if isinstance(row, EncodedRow) else Row(i, row) for i, row in enumerate(rows)]

    def _plain(self, row: Row, processor: ProcessorMixin) -> dict[str, Any]:
        """What a processor makes of the conversation of a row by the template of the run."""
        own, encoder = {"chat_template": getattr(self.processing_class, "chat_template", None)}, self._encoder_of(row)
        given = own | {name: value for name, value in encoder.template_kwargs.items() if value is not None}
        return plain_outputs(encoder.conversation(row), processor, self.args.audio_overlong, given)

    def encode(self, row: Row) -> SupervisedSequence:
        """A row as a sequence of at most `max_length` tokens."""
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
        if args.max_length is None or len(sequence) <= args.max_length:
            return sequence
        if sequence.modalities:
            raise MediaError(
                f"row {row.row_index} has {len(sequence)} tokens with its media, more than `max_length` "
                f"({args.max_length}), and media aren't cut; raise it, make the media smaller, or leave such rows out "
                "with `on_media_error='skip'`"
            )
        n_tokens = len(sequence)
        sequence = sequence.first(args.max_length, from_end=args.truncation_mode == "keep_end")
        if not sequence.learned[1:].any():
            raise OverlongRow(
                f"row {row.row_index} has {n_tokens} tokens, of which `max_length` ({args.max_length}) leaves none to "
                "learn; raise it, or make the prompt shorter"
            )
        return sequence

    def _encoder_of(self, row: Row) -> SupervisedEncoder:
        template_kwargs = {"chat_template": self.chat_template, **self._template_variables(row)}
        return replace(self.encoder, template_kwargs=template_kwargs)

    def _template_variables(self, row: Row) -> dict[str, Any]:
        """The tools of a row, and those of its `chat_template_kwargs` that the chat template reads."""
        tools, given = row.get("tools"), row.get("chat_template_kwargs") or {}
        tools = json.loads(tools) if isinstance(tools, str) else tools
        given = {name: value for name, value in given.items() if value is not None}
        if refused := sorted(_ARGUMENTS & given.keys()):
            raise ValueError(
                f"row {row.row_index}, column 'chat_template_kwargs': {refused} are no variables of a row; set "
                "`processing_class.chat_template` for all rows, and give 'messages' and 'tools' as columns"
            )
        # Processors would take other names as arguments of their own, such as `images`
        known = {name: value for name, value in given.items() if name in self._template_names}
        mode = self.args.special_tokens_in_text or "warn"

        def checked(value: Any, column: str) -> Any:
            return value and checked_texts(
                value, self.processing_class, mode, f"row {row.row_index}, column '{column}'"
            )

        return {"tools": checked(tools, "tools") or None, **checked(known, "chat_template_kwargs")}

    @cached_property
    def _template_names(self) -> set[str]:
        template = self.chat_template or getattr(self.processing_class, "chat_template", None) or ""
        sources = template.values() if isinstance(template, dict) else [template]
        return {name for source in sources for _, kind, name in Environment().lex(source) if kind == "name"}

    @cached_property
    def chat_template(self) -> str | None:
        """TRL's training template where the model's own renders earlier turns differently; `None` for its own."""
        if not self.args.assistant_only_loss:
            return None
        try:
            return get_training_chat_template(self.processing_class)
        except ValueError:  # unknown to TRL
            return None

    def prepare(self, dataset: Any, name: str) -> Any:
        """
        A dataset, or a dictionary of them, that the collator can encode.

        Rows whose labels `max_length` cuts off are dropped, as by TRL, and conversations renamed to `messages`.
        """
        if isinstance(dataset, dict):
            return {key: self.prepare(each, key) for key, each in dataset.items()}
        return None if dataset is None else self._prepare(dataset, name)

    def _prepare(self, dataset: Any, name: str) -> Any:
        args, formatting_func = self.args, self.formatting_func
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
                return dataset  # a transform gives others
            if args.dataset_text_field not in columns:
                layout = other_layout(dataset.features or dict.fromkeys(columns))
                text = f"`{args.dataset_text_field}` (`dataset_text_field`)"
                raise lacking(name, columns, f"`prompt` and `completion`, `messages`, `input_ids` or {text}", layout)
        if media:
            raise ValueError(
                f"The {name} dataset has plain text and media ({media}), and nothing says where in the text they are; "
                "give `prompt` and `completion`, or `messages`, or name the columns in `ignored_media_columns`."
            )
        if "input_ids" in columns:
            return _with_labels(dataset, name, columns, args)
        if args.assistant_only_loss:
            raise ValueError(
                f"`assistant_only_loss=True` needs `messages`, and the {name} dataset has text; set it to False."
            )
        return dataset

    def _columns_of(self, dataset: Any, name: str) -> tuple[set[str], list[str]]:
        """The columns of a dataset, and those with media. Raises if it is empty, or has media without a processor."""
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"The {name} dataset has no rows.")
        columns = set(get_dataset_column_names(dataset))
        media = sorted(columns & MEDIA_COLUMNS.keys() - set(self.args.ignored_media_columns or ()))
        if media:
            check_takes_media(self.processing_class, self.args.ignored_media_columns, dataset)
        return columns, media


def lacking(name: str, columns: set[str], needed: str, layout: str | None) -> ValueError:
    """The error of a dataset without the columns that are needed, which may be in another layout."""
    remedy = "" if layout is None else f"; {prepared(layout)}"
    return ValueError(f"The {name} dataset has the columns {sorted(columns)}; it needs {needed}{remedy}.")


def _with_labels(dataset: Any, name: str, columns: set[str], args: Any) -> Any:
    """The tokenized rows of which something is learned."""
    if "completion_mask" in columns and "labels" not in columns and args.completion_only_loss is None:
        raise ValueError(
            f"The {name} dataset has `completion_mask` and no `labels`; set `completion_only_loss` to say whether "
            "only completions are learned."
        )
    known = isinstance(dataset, Dataset) and lists_columns(dataset)  # others are dropped as they are read
    if not known or args.max_length is None or not columns & {"labels", "completion_mask", "assistant_masks"}:
        return dataset
    kept = slice(args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
    only = args.completion_only_loss
    left = dataset.filter(lambda row: any(label != -100 for label in row_labels(row, only)[kept]))
    if n_dropped := len(dataset) - len(left):
        logger.warning(f"{n_dropped} rows of the {name} dataset are dropped: `max_length` leaves nothing to learn.")
    return left
