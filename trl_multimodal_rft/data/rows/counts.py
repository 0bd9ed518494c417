# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Counts of media and of empty cells in a dataset, from the columns of its table."""

from collections.abc import Collection, Iterable

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Value

from ...modalities import MODALITIES
from .blocks import OPTIONS
from .features import Rows, feature_leaves
from .names import MEDIA_COLUMNS


# Keys in prompts that hold no media: keys of messages and text blocks, options of placeholder blocks, and "" for texts
_KEYS_WITHOUT_MEDIA = {"", "role", "content", "type", "text"}.union(*OPTIONS.values())


def max_media_per_row(dataset: Rows | None, ignored: Collection[str] = ()) -> dict[str, int] | None:
    """
    Returns upper bounds on the media of a row by modality, over the whole table, including rows that `select` left
    out. `None` if prompts may hold further media, and for streams and transforms.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return None
    columns = [column for column in dataset.format["columns"] if column not in ignored]
    if "prompt" not in columns or not all(
        key in _KEYS_WITHOUT_MEDIA and isinstance(leaf, Value)
        for key, leaf in feature_leaves(dataset.features["prompt"])
    ):
        return None
    bounds = dict.fromkeys(MODALITIES, 0)
    for column, modality in MEDIA_COLUMNS.items():
        if column not in columns:
            continue
        cells = dataset.data.column(column)
        if column == modality:
            cell_counts = pc.is_valid(cells)
        elif pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type):
            cell_counts = pc.list_value_length(cells)
        elif pa.types.is_null(cells.type):
            continue
        else:  # reading the rows raises an error for such a column
            return None
        bounds[modality] = max(bounds[modality], int(pc.max(pc.cast(cell_counts, pa.int64())).as_py() or 0))
    return bounds


def empty_row_indices(dataset: Dataset, column: str) -> list[int]:
    """Returns the indices of rows whose cell in a column is empty, see [`~data.rows.values.is_empty`]."""
    cells = dataset.data.column(column)
    is_empty = pc.is_null(cells, nan_is_null=True)
    if pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type):
        is_empty = pc.equal(pc.fill_null(pc.list_value_length(cells), 0), 0)
    elif pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        is_empty = pc.equal(pc.utf8_trim_whitespace(pc.fill_null(cells, "")), "")
    selection = dataset._indices  # selected rows of the table, `None` for all
    return pc.indices_nonzero(is_empty if selection is None else is_empty.take(selection.column(0))).to_pylist()


def describe_empty_cells(dataset: Rows | None, columns: Iterable[str]) -> str:
    """Names the columns of a dataset's table that are empty in some rows, with the number of these rows."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return ""
    row_indices = {
        column: empty_row_indices(dataset, column) for column in columns if column in dataset.format["columns"]
    }
    row_texts = {
        column: f"{len(indices)} of {len(dataset)} rows, first in {indices[0]}"
        for column, indices in row_indices.items()
        if indices
    }
    return "; ".join(f"column {column!r} is empty in {text}" for column, text in row_texts.items())
