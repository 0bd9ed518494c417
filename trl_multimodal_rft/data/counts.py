# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Counts the media of prompts without decoding or copying them."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..families import MODALITIES
from .columns import MEDIA_COLUMNS, block_kind
from .nested import Rows, feature_leaves


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class _Unknown(Exception):
    """A column whose type doesn't show how many media it holds."""


def most_media(dataset: Rows | None, ignored: Collection[str] = ()) -> dict[str, int] | None:
    """The most media of each kind that a prompt of a dataset has, in its columns and its messages."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return None
    columns = [column for column in dataset.format["columns"] if column not in ignored]
    if "prompt" not in columns or any(
        type(leaf).__name__ == "Json" for _, leaf in feature_leaves(dataset.features["prompt"])
    ):
        return None
    try:
        in_messages, waiting = _in_messages(dataset.data.column("prompt"))
        in_columns = {kind: np.zeros(len(dataset.data), int) for kind in MODALITIES}
        for column, kind in MEDIA_COLUMNS.items():
            if column in columns:
                held = dataset.data.column(column)
                counts = pc.is_valid(held).to_numpy().astype(int) if column == kind else _lengths(held)
                in_columns[kind] = np.maximum(in_columns[kind], counts)
    except _Unknown:
        return None
    # Media of columns fill the placeholders of the messages, or are added to the media of the messages
    totals = {kind: in_messages[kind] + np.where(waiting[kind], 0, in_columns[kind]) for kind in MODALITIES}
    return {kind: int(total.max(initial=0)) for kind, total in totals.items()}


def _lengths(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """The length of each list, 0 for null."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), int)
    if not any(is_list(column.type) for is_list in _LISTS):
        raise _Unknown
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(int)


def _in_messages(prompts: pa.ChunkedArray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Per row, the number of media blocks of each kind, and whether one is a placeholder for a medium of a column."""
    counted = {kind: np.zeros(len(prompts), int) for kind in MODALITIES}
    waiting = {kind: np.zeros(len(prompts), bool) for kind in MODALITIES}
    first = 0
    for chunk in prompts.chunks:
        rows = np.arange(first, first + len(chunk))
        first += len(chunk)
        messages, rows = _items(chunk, rows)
        blocks, rows = (None, rows) if messages is None else _items(_field(messages, "content"), rows)
        if blocks is None:
            continue
        types = _field(blocks, "type").to_pylist()
        # Any other field may hold the medium of a block
        others = [field.name for field in blocks.type if field.name not in ("type", "text")]
        held = np.zeros(len(blocks), bool)
        for name in others:
            held |= _field(blocks, name).is_valid().to_numpy(zero_copy_only=False)
        kinds = {each: block_kind(each) for each in set(types)}
        for kind in MODALITIES:
            of_kind = np.array([kinds[each] == kind for each in types], bool)
            np.add.at(counted[kind], rows[of_kind], 1)
            waiting[kind][rows[of_kind & ~held]] = True
    return counted, waiting


def _items(lists: pa.Array, rows: np.ndarray) -> tuple[pa.Array | None, np.ndarray]:
    """The items of lists and the row of each; none for texts."""
    if any(is_text(lists.type) for is_text in (pa.types.is_string, pa.types.is_large_string)):
        return None, rows
    lengths = _lengths(lists)
    return (None if pa.types.is_null(lists.type) else lists.flatten()), np.repeat(rows, lengths)


def _field(structs: pa.Array, name: str) -> pa.Array:
    if not pa.types.is_struct(structs.type) or structs.type.get_field_index(name) < 0:
        raise _Unknown
    return pc.struct_field(structs, name)
