# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets as folders of Parquet files that hold their media."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Audio, Dataset, DatasetDict, Image, LargeList, List, Video

from .columns import MediaRef
from .rules import DEFAULT_RULES, MediaRules
from .sources import fetch_file, open_file


# Bytes and rows that are written at once, and bytes after which another file begins
_GROUP_BYTES, _GROUP_ROWS, _FILE_BYTES = 2**26, 1000, 2**29


def write_folder(dataset: Dataset | DatasetDict, folder: str | os.PathLike, rules: MediaRules = DEFAULT_RULES) -> None:
    """
    Writes a dataset, with the files of its media, where `load_dataset(folder)` reads it.

    The media of features (`Audio`, `Image`, `Video`, also in lists and dictionaries) are in the Parquet files, with
    the name of the file that they come from. Paths in columns of text stay text. The folder is there whole or not at
    all.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.DatasetDict`]):
            Rows, or splits of them. What has no split is `"train"`.
        folder (`str` or `os.PathLike`):
            Folder that is empty, or not there yet.
        rules ([`~data.rules.MediaRules`], *optional*):
            From where media may come, and how large they may be.

    Raises:
        `ValueError`: If the folder isn't empty, a split has no rows, or rows come out of a transform.
        [`~data.columns.MediaError`]: If a medium can't be read. The message names the row and the column.

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
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (aside / "data").mkdir()
        for split, rows in splits.items():
            _write_split(rows, aside / "data", str(split), rules)
        aside.chmod(0o777 & ~_umask())
        aside.replace(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_empty(folder: str | os.PathLike) -> None:
    """Looks whether [`write_folder`] would write to a folder, before there is anything to write."""
    path = Path(folder)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"'{path}' isn't an empty folder; name another, or move what is there.")


def _write_split(rows: Dataset, folder: Path, split: str, rules: MediaRules) -> None:
    if rows.format["type"] == "custom":
        raise ValueError(f"the split '{split}' has a transform, whose rows aren't stored; apply it with `map`.")
    if len(rows) == 0:
        raise ValueError(f"the split '{split}' has no rows, which `load_dataset` can't read; leave it out.")
    schema = rows.features.arrow_schema
    files, groups = [], _groups(rows, schema, rules)
    group = next(groups, None)
    while group is not None:
        files.append(folder / f"{len(files):05}")
        with pq.ParquetWriter(files[-1], schema) as writer:
            written = 0
            while group is not None and written < _FILE_BYTES:
                writer.write_table(group)
                written += group.nbytes
                group = next(groups, None)
    for number, file in enumerate(files):  # as the Hub names them
        file.rename(folder / f"{split}-{number:05}-of-{len(files):05}.parquet")


def _groups(rows: Dataset, schema: pa.Schema, rules: MediaRules) -> Iterator[pa.Table]:
    """Rows with their media, as many as are written at once."""
    tables: Any = rows.with_format("arrow")
    media = [column for column, feature in rows.features.items() if _holds_media(feature)]
    group, size = [], 0
    for number in range(len(rows)):
        table = tables[number : number + 1]
        for column in media:
            value = _embedded(table[column][0].as_py(), rows.features[column], column, number, rules)
            field = schema.field(column)
            table = table.set_column(table.column_names.index(column), field, pa.array([value], field.type))
        group.append(table.select(schema.names).cast(schema))
        size += group[-1].nbytes
        if size > _GROUP_BYTES or len(group) == _GROUP_ROWS or number == len(rows) - 1:
            yield pa.concat_tables(group).combine_chunks()
            group, size = [], 0


def _embedded(value: Any, feature: Any, column: str, row: int, rules: MediaRules) -> Any:
    """A value in which each medium has its bytes."""
    if value is None:
        return None
    if isinstance(feature, dict):
        return {key: _embedded(item, feature[key], f"{column}.{key}", row, rules) for key, item in value.items()}
    if isinstance(feature, (List, LargeList)):
        return [_embedded(item, feature.feature, f"{column}[{i}]", row, rules) for i, item in enumerate(value)]
    if not isinstance(feature, (Audio, Image, Video)) or (value["path"] is None and value["bytes"] is None):
        return value
    data = value["bytes"]
    if data is None:
        ref = MediaRef(type(feature).__name__.lower(), value["path"], {}, column, row, rules)
        with open_file(fetch_file(ref, value["path"])) as stream:
            data = stream.read()
    return {"bytes": data, "path": None if value["path"] is None else os.path.basename(value["path"])}


def _holds_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_holds_media, feature.values()))
    if isinstance(feature, (List, LargeList)):
        return _holds_media(feature.feature)
    return isinstance(feature, (Audio, Image, Video))


def _umask() -> int:
    """What is taken from the rights of new folders, which those for a while don't have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
