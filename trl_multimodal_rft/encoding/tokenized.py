# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of rows of text, tokenized or plain."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin

from ..data.rows.batches import Row
from ..data.rows.cells import truth_value
from .processors import Processor, tokenizer_of
from .prompts import all_placeholder_ids, encode_prompt
from .sequences import SupervisedSequence, check_learned, with_text


@dataclass(eq=False)
class TextEncoder:
    """Encoder of rows of text, without media, by the processor and the unwrapped model."""

    processing_class: Processor
    model: PreTrainedModel

    def __post_init__(self):
        self._tokenizer = tokenizer_of(self.processing_class)

    @property
    def _end(self) -> str:
        """The text's end, which a trainer's `eos_token` may change after the encoder was made."""
        return self._tokenizer.eos_token or ""

    def encode_tokens(self, row: Row, completion_only: bool | None = None) -> SupervisedSequence:
        """
        Encodes a tokenized row of text. Tokens are learned unless their label is -100, see [`row_labels`], or
        `completion_mask` leaves them out with `completion_only`. Raises a `ValueError` for placeholders of media,
        labels that differ from the ids, and if nothing is learned.
        """
        label = f"row {row.row_index}"
        ids = torch.tensor(row["input_ids"])
        labels = torch.tensor(row_labels(row, completion_only))
        if labels.shape != ids.shape or not ((labels == ids) | (labels == -100)).all():
            raise ValueError(
                f"{label}, column 'labels': a label must equal the token of `input_ids` at the same index, or be -100."
            )
        if not all_placeholder_ids(self.model, self.processing_class).isdisjoint(row["input_ids"]):
            raise ValueError(
                f"{label}, column 'input_ids': it has placeholders without media; give `messages` with media."
            )
        # The first token's fields and position are the same for all texts, so any text provides them
        first_token = encode_prompt("-", self.processing_class, self.model, row=row.row_index).part(slice(1))
        sequence = with_text(replace(first_token, input_ids=ids[:1]), row["input_ids"][1:], self.model)
        sequence.learned = labels != -100
        check_learned(sequence, label)
        return sequence

    def encode_text(self, text: str, row_index: int) -> SupervisedSequence:
        """
        Encodes a text with the EOS token, tokenized as in TRL. All tokens are learned. `row_index` is for errors.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"row {row_index} has {type(text).__name__} in place of text; write a text, or remove the row."
            )
        ids = self.processing_class(text=with_end(text, self._end))["input_ids"]
        ids = ids[0] if isinstance(self.processing_class, ProcessorMixin) else ids
        return self.encode_tokens(Row(row_index, {"input_ids": ids}))


def row_labels(row: Mapping[str, Any], completion_only: bool | None = None) -> list[int]:
    """
    Returns the `labels` of a tokenized row. Without `labels`, returns its ids, with -100 where a mask is 0: the ids
    5, 6, 7 with the `assistant_masks` 0, 1, 1 give -100, 6, 7. `completion_mask` counts if `completion_only`.
    """
    if row.get("labels") is not None:
        return row["labels"]
    names = ["assistant_masks", "completion_mask"] if completion_only else ["assistant_masks"]
    index = getattr(row, "row_index", 0)
    masks = [[truth_value(bit, name, index) for bit in row[name]] for name in names if row.get(name) is not None]
    return [token if all(bits) else -100 for token, *bits in zip(row["input_ids"], *masks, strict=False)]


def with_end(text: str, end: str) -> str:
    return text if text.endswith(end) else text + end
