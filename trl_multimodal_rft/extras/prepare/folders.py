# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Writer of datasets to folders of Parquet files that hold the media."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets.features.features import FeatureType
from tqdm import tqdm

from ...data.reading.refs import MediaRef
from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...data.reading.sizes import media_size
from ...data.reading.sources import fetch_file, open_file
from ...data.rows.features import is_media_feature
from ...data.rows.nested import feature_leaves, map_features
from ...progress import progress_bar


# Bytes and rows after which another row group of Parquet begins, and bytes after which another file begins
_ROW_GROUP_BYTES = 2**26
_ROW_GROUP_ROWS = 1000
_FILE_BYTES = 2**29

T = TypeVar("T")


def write_folder(dataset: Dataset | DatasetDict, folder: str | os.PathLike, rules: MediaRules = DEFAULT_RULES) -> None:
    """
    Writes a dataset and its media to a folder that `load_dataset(folder)` reads.

    The Parquet files hold the media of `Audio`, `Image` and `Video` features, nested features included, with file
    names. Paths in text columns stay text. If writing fails, no file is left.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.DatasetDict`]):
            Rows, or splits of them. Rows without a split become `"train"`.
        folder (`str` or `os.PathLike`):
            Folder that is empty or doesn't exist.
        rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.

    Raises:
        `ValueError`: If the folder isn't empty, or if a split is empty or has a transform.
        [`~data.reading.refs.MediaError`]: If a medium can't be read. The message names the row and the column.

    Example:
    ```python
    write_folder(load_avqa("AVQA/train_r1aqa_line.json"), "avqa")
    dataset = load_dataset("avqa", split="train")
    ```
    """
    check_empty(folder)
    splits = dataset if isinstance(dataset, DatasetDict) else {str(dataset.split or "train"): dataset}
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        data_folder = Path(temporary, folder.name, "data")
        data_folder.mkdir(parents=True)
        for split, rows in splits.items():
            with progress_bar(len(rows), f"write {split}") as bar:
                _write_split(rows, data_folder, str(split), rules, bar)
        data_folder.parent.replace(folder)


def check_empty(folder: str | os.PathLike) -> None:
    """Raises a `ValueError` unless a folder is empty or missing."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"'{path}' isn't an empty folder; name another folder, or move its files.")


def _write_split(rows: Dataset, folder: Path, split: str, rules: MediaRules, bar: tqdm) -> None:
    if rows.format["type"] == "custom":
        raise ValueError(f"the split '{split}' has a transform, whose rows aren't stored; apply it with `map`.")
    if len(rows) == 0:
        raise ValueError(f"the split '{split}' has no rows, which `load_dataset` can't read; leave it out.")
    schema = rows.features.arrow_schema
    files = []
    row_groups = _row_groups(rows, schema, rules, bar)
    row_group = next(row_groups, None)
    while row_group is not None:
        files.append(folder / f"{len(files):05}")
        with pq.ParquetWriter(files[-1], schema) as writer:
            n_bytes = 0
            while row_group is not None and n_bytes < _FILE_BYTES:
                writer.write_table(row_group)
                n_bytes += row_group.nbytes
                row_group = next(row_groups, None)
    for index, file in enumerate(files):  # as on the Hub, names have the number of files, known only now
        file.rename(folder / f"{split}-{index:05}-of-{len(files):05}.parquet")


def _row_groups(rows: Dataset, schema: pa.Schema, rules: MediaRules, bar: tqdm) -> Iterator[pa.Table]:
    def embed(value: T, feature: FeatureType, column: str) -> T | dict[str, str | bytes | None]:
        # `index` is the row that the loop below reads
        if not is_media_feature(feature) or not isinstance(value, dict) or value["path"] is value["bytes"] is None:
            return value
        path = value["path"]
        data = value["bytes"]
        ref = MediaRef(type(feature).__name__.lower(), value if data else path, {}, column, index, rules)
        media_size(ref)  # raises for a file that isn't of this modality
        if data is None:
            with open_file(ref, fetch_file(ref, path)) as stream:
                data = stream.read()
        return {"bytes": data, "path": None if path is None else os.path.basename(path)}

    tables = rows.with_format("arrow")
    media_columns = [
        column
        for column, feature in rows.features.items()
        if any(is_media_feature(leaf) for _, leaf in feature_leaves(feature))
    ]
    row_tables = []
    n_bytes = 0
    for index in range(len(rows)):
        table = cast(pa.Table, tables[index : index + 1])
        for column in media_columns:
            value = map_features(table[column][0].as_py(), rows.features[column], embed, column)
            field = schema.field(column)
            table = table.set_column(table.column_names.index(column), field, pa.array([value], field.type))
        row_tables.append(table.select(schema.names).cast(schema))
        n_bytes += row_tables[-1].nbytes
        bar.update()
        if n_bytes > _ROW_GROUP_BYTES or len(row_tables) == _ROW_GROUP_ROWS or index == len(rows) - 1:
            yield pa.concat_tables(row_tables).combine_chunks()
            row_tables = []
            n_bytes = 0
