# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dataset checks and collator of supervised training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import maybe_convert_to_chatml

from ...data.reading.refs import MediaError, OverlongRow
from ...data.rows.batches import Row
from ...data.rows.labels import class_names
from ...data.rows.names import other_layout
from ...data.rows.unread import lists_columns
from ...data.rows.values import is_empty
from ...encoding.concatenated import PART_LENGTHS, encode_concatenated
from ...encoding.prompts import check_ids
from ...encoding.sequences import SupervisedSequence
from ...encoding.tokenized import row_labels
from ..reading.collator import RowCollator, missing_columns_error
from .config import MultimodalSFTConfig


logger = get_logger(__name__)

_TEXT_WITH_MEDIA = (
    "plain text and media ({media}), and nothing says where in the text they are; give `prompt` and `completion`, or "
    "`messages`, or ignore the media by `ignored_media_columns`"
)


@dataclass
class SupervisedCollator(RowCollator[MultimodalSFTConfig]):
    """Collator that encodes whole rows with their media, and pads the labels of a micro-batch."""

    formatting_func: Callable[[dict], str] | None = None
    _token_names = ("input_ids", "labels")

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
            "n_counted": getattr(rows, "n_counted", len(rows)),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            "plain": lambda load, i: self._plain_outputs(stored[i], load()),
        }

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
        if self._is_text(row):
            self.read(row)
        if row.get("input_ids"):
            sequence = self.encoder.encode_tokens(row, args.completion_only_loss)
        elif self.formatting_func is not None:
            sequence = self.encoder.encode_text(self.formatting_func(row), row.row_index)
        elif self._is_text(row):
            sequence = self.encoder.encode_text(class_names(row[args.dataset_text_field]), row.row_index)
        else:
            sequence = self._encoder_of(row).encode_sequence(row, args.completion_only_loss, args.assistant_only_loss)
        check_ids(sequence.input_ids, self.model.config, row.row_index)
        return sequence

    def _is_text(self, row: Row) -> bool:
        """Returns whether a row is tokenized, or written as one text."""
        is_text_alone = self.args.dataset_text_field in row and not row.keys() & {"prompt", "messages"}
        return bool(row.get("input_ids")) or self.formatting_func is not None or is_text_alone

    def read(self, row: Row) -> list:
        if not self._is_text(row):
            return self._encoder_of(row).read(row, "sequence", self.args.completion_only_loss)
        media = sorted(name for name in self._media_columns if not is_empty(row.get(name)))
        if media and not row.get(PART_LENGTHS):
            raise MediaError(f"row {row.row_index}: {_TEXT_WITH_MEDIA.format(media=media)}")
        return []

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
        if self.formatting_func is not None:
            return self.args.max_length is not None
        return super().may_drop(row)

    def _token_columns(self, row: Row) -> dict[str, list[int]]:
        return self.tokens(row)

    def tokens(self, row: Row, cut: bool = True) -> dict[str, list[int]]:
        """Returns the tokens and labels of a row of text, without `cut` beyond `max_length`. See [`encode`]."""
        sequence = self._encode_whole(row)
        sequence = self._cut(sequence) if cut else sequence
        labels = sequence.input_ids.masked_fill(~sequence.learned, -100)
        return {"input_ids": sequence.input_ids.tolist(), "labels": labels.tolist()}

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
            raise ValueError(f"The {name} dataset has {_TEXT_WITH_MEDIA.format(media=media)}.")
        if "input_ids" in columns:
            return _with_labels(dataset, name, columns, args)
        if args.assistant_only_loss:
            raise ValueError(
                f"`assistant_only_loss=True` needs `messages`, but the {name} dataset has plain text; set it to False."
            )
        return dataset


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
