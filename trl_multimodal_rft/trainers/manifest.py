# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a checkpoint holds, written down beside it: a file that is missing or has changed is told before it is used."""

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


_MANIFEST = "manifest.json"

_BLOCK = 1 << 24  # bytes read at once
_READERS = 8  # files read at once; sums are made without the GIL


def write_manifest(checkpoint: str | Path, model_only: bool) -> None:
    """
    Writes down sizes and checksums (CRC-32) of all files below the folder of a checkpoint.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint, to which nothing is added afterwards.
        model_only (`bool`):
            Whether what resuming needs was left out on purpose.
    """
    files = _files(Path(checkpoint))
    entries = dict(zip(files, _sums(files.values()), strict=True))
    Path(checkpoint, _MANIFEST).write_text(json.dumps({"model_only": model_only, "files": entries}, indent=1))


def damage(checkpoint: str | Path) -> list[str]:
    """
    What is wrong with the files of a checkpoint.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.

    Returns:
        `list[str]`: A clause for each file that is missing or has changed since the manifest was written. Without a
        manifest, for each that can't be right whatever it was.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return ["there is no such folder"]
    found = _files(folder)
    try:
        manifest = _read(folder)
        expected = {} if manifest is None else {name: tuple(entry) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{_MANIFEST} can't be read"]
    wrong = [f"{name} is missing" for name in sorted({TRAINER_STATE_NAME, *expected} - found.keys())]
    if manifest is None:
        return wrong + [f"{name} is empty" for name in found if _empty(found[name])]
    kept = [name for name in expected if name in found]
    for name in kept:
        size = found[name].stat().st_size
        if size != expected[name][0]:
            wrong.append(f"{name} has {size} bytes, not {expected[name][0]}")
    same_size = [name for name in kept if found[name].stat().st_size == expected[name][0]]
    sums = _sums(found[name] for name in same_size)
    wrong += [f"{name} has other content" for name, own in zip(same_size, sums, strict=True) if own != expected[name]]
    return wrong


def lacks(checkpoint: str | Path) -> str | None:
    """
    What a checkpoint without damage can't be relied on for.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.

    Returns:
        `str` or `None`: A clause; `None` if it has a manifest and all that resuming needs.
    """
    manifest = _read(Path(checkpoint))
    if manifest is None:
        return f"has no {_MANIFEST}, so nobody can tell whether its files are those that were saved"
    if manifest["model_only"]:
        return "holds the model only (`save_only_model`), so optimizer, schedule and random numbers start anew"
    return None


def _read(folder: Path) -> dict | None:
    path = folder / _MANIFEST
    return json.loads(path.read_text()) if path.exists() else None


def _files(folder: Path) -> dict[str, Path]:
    """All files by their names below the folder."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found.pop(_MANIFEST, None)
    return found


def _sums(files: Iterable[Path]) -> list[tuple[int, int]]:
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(_sum, files))


def _sum(file: Path) -> tuple[int, int]:
    """Size and checksum of what is read."""
    size = checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def _empty(file: Path) -> bool:
    """Whether a file is empty of a kind that never is, unlike a tokenizer's list of merges."""
    return file.suffix in (".bin", ".json", ".pt", ".pth", ".safetensors") and file.stat().st_size == 0
