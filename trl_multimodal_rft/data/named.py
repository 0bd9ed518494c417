# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets by their names."""

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetGenerationError, DatasetsError

from ..paths import local_path


def load_rows(name: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads a dataset."""
    path = local_path(name)
    where = ", which is no file or folder here," if path is None and "://" not in name else ""
    with reading(f"the dataset {name!r}{where}"):
        if config is not None and path is not None and (path.is_file() or is_saved(path)):
            kind = "a file" if path.is_file() else "a folder of `save_to_disk`"
            raise ValueError(f"{kind} has no configurations, so leave out {config!r}")
        if path is not None and is_saved(path):
            rows: Any = datasets.load_from_disk(path)
            if isinstance(rows, dict):
                if split not in rows:
                    raise ValueError(f"it has the splits {sorted(rows)}, not {split!r}")
                rows = rows[split]
            rows = rows.to_iterable_dataset() if streaming else rows
        else:
            rows = datasets.load_dataset(**load_arguments(name, split), name=config, split=split, streaming=streaming)
        if isinstance(rows, Dataset) and not len(rows):
            raise ValueError("it has no rows")
    return rows


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what `datasets` raises within the context into one line."""
    try:
        yield
    except StopIteration as error:  # of an empty file of JSON Lines
        raise ValueError(f"{what} can't be read: it has no rows") from error
    except (OSError, ValueError, DatasetsError) as error:
        # What went wrong, rather than that something did
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise ValueError(f"{what} can't be read: {' '.join(str(reason).split())}") from error


def load_arguments(name: str, split: str) -> dict[str, Any]:
    """How `datasets.load_dataset` reads a dataset."""
    path = local_path(name)
    if path is None:
        return {"path": name}
    path, split = path.absolute(), re.split(r"[\[+]", split)[0]
    if path.is_file():
        return {"path": str(path.parent), "data_files": {split: glob.escape(path.name)}}
    if is_saved(path):
        folder = path if (path / "state.json").is_file() else path / split
        return {"path": "arrow", "data_files": {split: f"{glob.escape(str(folder))}/*.arrow"}}
    return {"path": str(path)}


def is_saved(path: Path) -> bool:
    """Whether a folder is one of `save_to_disk`."""
    return any((path / each).is_file() for each in ("dataset_dict.json", "state.json"))
