# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of datasets by name and of JSON files of rows, and checks of columns."""

import glob
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from datasets.data_files import SPLIT_KEYWORDS
from datasets.exceptions import DatasetGenerationError, DatasetsError

from ...paths import local_path
from ...printable import printable


# Files in the folder of a model, an adapter or a run, whose pictures and lists `datasets` would read as rows
_MODEL_FILES = ("adapter_config.json", "training_args.bin", "model.safetensors", "model.safetensors.index.json")


def load_rows(name: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Returns the rows of a dataset's split. The dataset is a file, a folder or on the Hub."""
    path = local_path(name)
    hint = ", which is no local file or folder," if path is None and "://" not in name else ""
    with one_line_errors(f"the dataset {name!r}{hint}"):
        if config is not None and path is not None and (path.is_file() or is_saved_to_disk(path)):
            path_type = "a file" if path.is_file() else "a folder of `save_to_disk`"
            raise ValueError(f"{path_type} has no configurations, so leave out {config!r}")
        if path is not None and any((path / name).is_file() for name in _MODEL_FILES):
            raise ValueError("it is the folder of a model or an adapter, which has no rows")
        if path is not None and is_saved_to_disk(path):
            saved = datasets.load_from_disk(path)
            if isinstance(saved, dict) and split not in saved:
                raise ValueError(f"it has the splits {sorted(saved)}, not {split!r}")
            rows = saved[split] if isinstance(saved, dict) else saved
            rows = rows.to_iterable_dataset() if streaming else rows
        else:
            rows = datasets.load_dataset(
                **load_dataset_arguments(name, split), name=config, split=split, streaming=streaming
            )
        if isinstance(rows, Dataset) and not len(rows):
            raise ValueError("it has no rows")
        if path is not None and path.is_dir():
            _check_tables(path, rows.column_names or ())
        check_separator(rows.column_names or ())
    return rows


def _check_tables(folder: Path, columns: Collection[str]) -> None:
    """Raises a `ValueError` about a table beside media, of which `datasets` reads `metadata.csv` alone."""
    if not columns or not {*columns} <= {"audio", "image", "video", "label"} or is_saved_to_disk(folder):
        return
    tables = (path for path in sorted(folder.iterdir()) if path.suffix in (".csv", ".tsv", ".jsonl", ".json"))
    unread = {"metadata", "dataset_info", "dataset_infos", "dataset_dict", "state"}
    table = next((path for path in tables if path.stem not in unread), None)
    if table is not None:
        raise ValueError(
            f"its table {table.name!r} isn't read beside media; name the table, {str(table)!r}, and {str(folder)!r} "
            "as `media_dir`, or call it 'metadata.csv' with the files' names in a column 'file_name'"
        )


def check_separator(columns: Collection[str]) -> None:
    """Raises a `ValueError` if a table was read with the wrong separator between cells."""
    for column in columns:
        separator = re.search(r"[;|\t,]" if len(columns) == 1 else r"[;|\t]", column)
        if separator:
            raise ValueError(
                f"column {column!r} is several columns, joined by {separator[0]!r}; save the table with commas as "
                f".csv or with tabs as .tsv, or load it with "
                f"`load_dataset('csv', data_files=..., sep={separator[0]!r})`"
            )


def only_split(name: str, config: str | None) -> str | None:
    """
    Returns the only split of a local file or folder, as `datasets` names it. Returns `None` if there are several
    splits, or if the dataset isn't local.
    """
    path = local_path(name)
    if path is None:
        return None
    if path.is_file():  # `datasets` names the split after a word in the file's name, such as "test" in `my_test.csv`
        words = re.split("[^a-z]+", path.stem.lower())
        return next((str(split) for split, names in SPLIT_KEYWORDS.items() if {*names} & {*words}), "train")
    with one_line_errors(f"the dataset {name!r}"):
        if is_saved_to_disk(path):
            saved = datasets.load_from_disk(path)
            splits = [*saved] if isinstance(saved, dict) else [str(saved.split or "train")]
        else:
            splits = datasets.get_dataset_split_names(str(path), config)
    return splits[0] if len(splits) == 1 else None


@contextmanager
def one_line_errors(label: str) -> Iterator[None]:
    """Turns errors of reading a dataset within the context into a `ValueError` of one line."""
    try:
        yield
    except StopIteration as error:  # raised for an empty file of JSON Lines
        raise ValueError(f"{label} can't be read: it has no rows") from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        # `DatasetGenerationError` says only that generating failed, so its cause is shown
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        reason = " ".join(str(cause).split())
        if isinstance(cause, RecursionError):
            reason = "values are nested too deeply; store them as text"
        elif reason.startswith("Unknown split"):
            reason = f"{reason.rstrip('.')}; `--help` lists the options that choose a split"
        elif reason.startswith("Dataset scripts"):
            reason += (
                "; name a file of its rows, or save them as Parquet with a version of `datasets` that runs scripts"
            )
        elif reason.startswith("Unable to find") and " [" in reason:
            reason = f"{reason.split(' [')[0]}, such as .csv, .jsonl and .parquet; save a spreadsheet as .csv in UTF-8"
        elif isinstance(cause, UnicodeDecodeError) or reason.startswith("Error tokenizing"):
            reason += "; save it in UTF-8, with commas between cells, and quotes around cells with commas"
        raise ValueError(f"{label} can't be read: {printable(reason)}") from error


def load_dataset_arguments(name: str, split: str) -> dict[str, Any]:
    """Returns the arguments by which `datasets.load_dataset` reads a dataset."""
    path = local_path(name)
    if path is None:
        return {"path": name}
    # The first split's name alone: `train` of `train[:10]` and of `train+test`
    path = path.absolute()
    split = re.split(r"[\[+]", split)[0]
    if path.is_file():  # without `/.`, `datasets` would run a script that is named like the folder
        return {"path": f"{path.parent}/.", "data_files": {split: glob.escape(path.name)}}
    if is_saved_to_disk(path):
        folder = path if (path / "state.json").is_file() else path / split
        return {"path": "arrow", "data_files": {split: f"{glob.escape(str(folder))}/*.arrow"}}
    return {"path": str(path)}


def is_saved_to_disk(path: Path) -> bool:
    """Returns whether a path is a folder that `save_to_disk` wrote."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def json_file(path: str | Path, pattern: str) -> Path | None:
    """
    Returns the file that `path` names, or the one file in the folder `path` that matches `pattern`. Returns `None` for
    a `.parquet` file, a folder without a match, and a dataset on the Hub.
    """
    path = local_path(str(path)) or Path(path)
    if path.is_file():
        return None if path.suffix == ".parquet" else path
    files = sorted(path.glob(pattern)) if path.is_dir() else []
    if len(files) > 1:
        raise ValueError(f"{path} holds {[file.name for file in files]}; name one of them as `path`.")
    return files[0] if files else None


def read_json(file: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file of JSON or JSON Lines."""
    with one_line_errors(str(file)):
        lines = text_lines(file)
        if lines and lines[0].lstrip().startswith("["):
            return json.loads("".join(lines))
        return [json.loads(line) for line in lines]


def text_lines(file: Path) -> list[str]:
    """Returns the lines of a text that aren't empty. They end with a line feed alone, as those of JSON Lines do."""
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        return [line for line in stream if line.strip()]


def required(row: dict[str, Any], index: int, *names: str) -> Any:
    """Returns the value of the first column in `names` that a row has, or raises a `ValueError`."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(
        f"row {index} has no {' or '.join(map(repr, names))}, only {sorted(row)}; correct the row, or choose another "
        "layout."
    )
