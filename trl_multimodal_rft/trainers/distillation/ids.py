# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names of teachers in the column `teacher_id`, checked before a run from the datasets' tables."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from ...data.rows.labels import as_class_number, class_names
from ...data.rows.names import TEACHER_ID
from ...data.rows.unread import lists_columns
from ..base.dataset_checks import named_splits


logger = get_logger(__name__)


def check_teacher_ids(datasets: Mapping[str, Any], names: Collection[str]) -> None:
    """
    Raises a `ValueError` for datasets whose rows don't name one of the teachers, by their `names`, and warns of a
    teacher without training rows. Reads no media. Rows of streams and transforms are checked when they are read.
    """
    for label, dataset in named_splits(datasets):
        if isinstance(dataset, Dataset) and lists_columns(dataset):
            columns = dataset.format["columns"]
        else:
            columns = dataset.column_names if isinstance(dataset, IterableDataset) else None
        if columns is None:
            continue
        if names and TEACHER_ID not in columns:
            raise ValueError(
                f"{label} has no column {TEACHER_ID!r}, in which each row names one of the teachers {[*names]}, only "
                f"{sorted(columns)}; add it."
            )
        if isinstance(dataset, Dataset) and TEACHER_ID in columns:
            ids = _ids(dataset)
            if ids is not None:
                _check_ids(label, ids, names)


def _ids(dataset: Dataset) -> list[Any] | None:
    """Returns the ids of rows, names for class labels, or `None` for a column of lists, whose rows are refused."""
    cells = dataset.data.column(TEACHER_ID)
    if pa.types.is_nested(cells.type):
        return None
    cells = cells if dataset._indices is None else cells.take(dataset._indices.column(0))
    feature = dataset.features[TEACHER_ID]
    unique_cells = cells.unique()
    names = [class_names(as_class_number(value, feature)) for value in unique_cells.to_pylist()]
    return [names[index] for index in pc.index_in(cells, unique_cells).to_pylist()]


def _check_ids(label: str, ids: list[Any], names: Collection[str]) -> None:
    counts = Counter(name for name in ids if name is not None)
    wrong = [name for name in counts if name not in names]
    if not names and counts:
        raise ValueError(
            f"{label}: row {ids.index(wrong[0])} has a {TEACHER_ID!r}, but there are no teachers to choose from; pass "
            "`teacher_models`, or remove the column."
        )
    if wrong:
        texts = [f"{name!r} in {counts[name]} of {len(ids)} rows, first in row {ids.index(name)}" for name in wrong]
        raise ValueError(
            f"{label}, column {TEACHER_ID!r}: {'; '.join(texts)}: none of the teachers {[*names]}; write one of them, "
            "or leave the cells empty."
        )
    if names and not counts:
        raise ValueError(
            f"{label}, column {TEACHER_ID!r}: no row names its teacher; write one of {[*names]} into the cells."
        )
    unused = [name for name in names if name not in counts]
    if unused and label == "`train_dataset`":
        logger.warning(
            f"{label}: no row names the teachers {unused} in the column {TEACHER_ID!r}, so that they teach nothing; "
            "leave them out."
        )
