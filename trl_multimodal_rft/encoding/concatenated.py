# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Concatenated rows, which hold the tokens of several rows of a dataset."""

from itertools import accumulate

from ..data.rows.batches import Row
from .sequences import SupervisedSequence
from .tokenized import TextEncoder, row_labels


# Column of the lengths of the rows that a concatenated row holds, as `trl.pack_dataset` names it
PART_LENGTHS = "seq_lengths"


def encode_concatenated(encoder: TextEncoder, row: Row) -> list[SupervisedSequence]:
    """
    Encodes the rows that a concatenated row (`input_ids`, `seq_lengths`, optionally `labels`, as from
    [`~trl.pack_dataset`]) holds, each for itself, without those in which nothing is learned. Raises a `ValueError` if
    none is left.
    """
    label = f"row {row.row_index}"
    ids = row["input_ids"]
    lengths = row[PART_LENGTHS]
    if sum(lengths) != len(ids):
        raise ValueError(
            f"{label}, column '{PART_LENGTHS}': its lengths are those of {sum(lengths)} tokens, but `input_ids` has "
            f"{len(ids)}; pack the rows again, with `trl.pack_dataset`."
        )
    labels = row_labels(row)
    starts = [0, *accumulate(lengths)]
    spans = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    spans = [span for span in spans if any(token != -100 for token in labels[span][1:])]
    if not spans:
        raise ValueError(f"{label} has nothing to learn: its labels are -100, or first in a row; remove the row.")
    parts = [{"input_ids": ids[span], "labels": labels[span]} for span in spans]
    return [encoder.encode_tokens(Row(row.row_index, part)) for part in parts]
