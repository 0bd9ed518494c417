# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets by their names."""

from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset


def load_rows(name: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """
    Loads a dataset.

    Args:
        name (`str`):
            Name on the Hub, folder or file.
        config (`str`, *optional*):
            Its configuration.
        split (`str`):
            Which rows.
        streaming (`bool`):
            Whether they are read as they are needed.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: The rows.

    Raises:
        `ValueError`: If there is no such dataset.
    """
    path = Path(name)
    try:
        if any((path / each).is_file() for each in ("dataset_dict.json", "state.json")):
            rows: Any = datasets.load_from_disk(name)
            if isinstance(rows, dict):
                if split not in rows:
                    raise ValueError(f"it has the splits {sorted(rows)}, not {split!r}")
                rows = rows[split]
        elif path.is_file():
            rows = datasets.load_dataset(str(path.parent), data_files={split: path.name}, split=split)
        else:
            rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        raise ValueError(f"the dataset {name!r} can't be read: {error}") from error
    return rows
