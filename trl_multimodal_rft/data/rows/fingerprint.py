# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Comparison of the dataset of a resumed run with the dataset at the start of the run, by some of the rows."""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import numpy as np
import PIL.Image
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset

from .features import Rows


# Limit on the number of evenly spaced rows that are compared
_N_ROWS = 64

_LIST_PREDICATES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def fingerprint(dataset: Rows | torch.utils.data.Dataset | None, media_dir: str | None = None) -> dict[str, Any]:
    """
    Returns values that identify a dataset by its contents, for a stream only by its columns. Unlike the fingerprint of
    Datasets, these values don't depend on the folder and the history of the dataset.
    """
    if isinstance(dataset, IterableDataset):
        return {"columns": dataset.column_names and sorted(dataset.column_names)}
    inner = getattr(dataset, "dataset", None)
    if inner is not None and not isinstance(dataset, Dataset):  # a wrapper, which may make rows at random
        return fingerprint(inner, media_dir)
    if not isinstance(dataset, (Dataset, list, tuple)):
        return {}
    # The step between rows is rounded up, and 1 for an empty dataset
    row_indices = [*range(0, len(dataset), -(-len(dataset) // _N_ROWS) or 1)]
    if not isinstance(dataset, Dataset):
        checksums = {str(i): _checksum(_bytes_of(dataset[i], media_dir or "")) for i in row_indices}
        return {"rows": len(dataset), "columns": None, "checksums": checksums}
    columns = sorted(dataset.column_names)
    table = cast(pa.Table, dataset.with_format("arrow")[row_indices])
    checksums = {}
    for i, row_index in enumerate(row_indices):
        row = table.slice(i, 1)
        parts = chain.from_iterable(_byte_chunks(row[column], media_dir or "") for column in columns)
        checksums[str(row_index)] = _checksum(parts)
    return {"rows": len(dataset), "columns": columns, "checksums": checksums}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describes the differences between two results of [`fingerprint`], for the keys that both have."""
    common_names = {name for name in before.keys() & now.keys() if None not in (before[name], now[name])}
    texts = []
    if "rows" in common_names and before["rows"] != now["rows"]:
        texts.append(f"it has {now['rows']} rows, not {before['rows']}")
    if "columns" in common_names and before["columns"] != now["columns"]:
        texts.append(f"its columns are {', '.join(now['columns'])}, not {', '.join(before['columns'])}")
    elif "checksums" in common_names:
        checksums = before["checksums"], now["checksums"]
        changed_rows = [row for row in checksums[0] if row in checksums[1] and checksums[0][row] != checksums[1][row]]
        if changed_rows:
            row_names = ", ".join(changed_rows[:5]) + (", ..." if len(changed_rows) > 5 else "")
            texts.append(
                f"of the {len(checksums[1])} rows compared, {len(changed_rows)} or their files differ "
                f"(rows {row_names})"
            )
    return texts


def _checksum(parts: Iterable[bytes]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _bytes_of(value: Any, media_dir: str) -> Iterator[bytes]:
    """Yields the bytes of a row of Python objects, or of a value in it. Of further types, only the name counts."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield repr(key).encode()
            yield from _bytes_of(value[key], media_dir)
    elif isinstance(value, (list, tuple)):
        yield repr(len(value)).encode()
        for item in value:
            yield from _bytes_of(item, media_dir)
    elif isinstance(value, PIL.Image.Image):
        yield from (repr((value.mode, value.size)).encode(), value.tobytes())
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from _bytes_of(value.tolist(), media_dir)
    elif isinstance(value, np.ndarray):
        yield from (repr((value.dtype, value.shape)).encode(), value.tobytes())
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
        yield from _bytes_of(value.detach().cpu().float().numpy(), media_dir)
    elif isinstance(value, bytes):
        yield from (repr(len(value)).encode(), value)
    elif isinstance(value, str):
        yield repr(_file_identity(value, media_dir)).encode()
    elif value is None or isinstance(value, (bool, int, float)):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()


def _file_identity(text: str, media_dir: str) -> str | tuple[str, int]:
    """Returns the name and size of a file, whose folder doesn't count, or the text itself if it names no file."""
    path = os.path.join(media_dir, text)
    return (os.path.basename(path), os.path.getsize(path)) if os.path.isfile(path) else text


def _byte_chunks(values: pa.ChunkedArray | pa.Array, media_dir: str) -> Iterator[bytes]:
    """
    Yields the bytes of Arrow values. They don't depend on the chunks in which Arrow holds the values.

    Lengths of lists are among the bytes, so that `[[1], [2]]` and `[[1, 2]]` differ.
    """
    if isinstance(values, pa.ChunkedArray):
        for chunk in values.chunks:
            yield from _byte_chunks(chunk, media_dir)
    elif isinstance(values, pa.ExtensionArray):
        yield from _byte_chunks(values.storage, media_dir)
    elif pa.types.is_struct(values.type):
        yield repr(values.is_valid().to_pylist()).encode()
        for part in values.flatten():
            yield from _byte_chunks(part, media_dir)
    elif any(is_list(values.type) for is_list in _LIST_PREDICATES):
        yield repr(values.value_lengths().to_pylist()).encode()
        yield from _byte_chunks(values.flatten(), media_dir)
    elif pa.types.is_primitive(values.type) and not pa.types.is_boolean(values.type) and not values.null_count:
        yield values.to_numpy(zero_copy_only=False).tobytes()
    else:
        for value in values.to_pylist():
            if isinstance(value, bytes):
                yield from (repr(len(value)).encode(), value)
                continue
            yield repr(_file_identity(value, media_dir) if isinstance(value, str) else value).encode()
