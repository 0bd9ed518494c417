# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Manifests of checkpoints, which show missing and changed files before a run resumes."""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ...data.rows.fingerprint import differences


MANIFEST = "manifest.json"

_BLOCK = 1 << 24  # bytes read at once
_READERS = 8  # files read at once, in threads, as checksums are computed without the GIL


def write_manifest(
    checkpoint: Path,
    model_only: bool,
    fingerprints: dict[str, Any] | None = None,
    measurements: dict[str, tuple[int, int]] | None = None,
    algorithm: str | None = None,
) -> None:
    """
    Writes the sizes and checksums (CRC-32) of a checkpoint's files, the run's `algorithm`, and the `fingerprints` of
    the run's datasets. Reads the files, unless `measurements` holds their sizes and checksums.
    """
    entries = _measure_files(checkpoint, [*_files(checkpoint)]) if measurements is None else measurements
    content = {"algorithm": algorithm, "model_only": model_only, "datasets": fingerprints or {}, "files": entries}
    Path(checkpoint, MANIFEST).write_text(json.dumps(content, indent=1))


def measure_folder(folder: Path, process_index: int, num_processes: int) -> dict[str, tuple[int, int]]:
    """Returns sizes and checksums of a folder's files. Each rank reads a share of them. All ranks must call this."""
    (names,) = broadcast_object_list([[*_files(folder)]])
    return dict(sorted(gather_object([*_measure_files(folder, names[process_index::num_processes]).items()])))


def verify_checkpoint(checkpoint: str | Path) -> list[str]:
    """Returns messages about the missing, changed and unreadable files of a checkpoint."""
    folder = Path(checkpoint)
    try:
        if not folder.is_dir():
            return ["there is no such folder"]
        files = _files(folder)
    except (OSError, RecursionError) as error:
        return [f"it can't be read ({_reason(error)})"]
    try:
        manifest = _read_manifest(folder)
    except Exception as error:  # the manifest may hold anything
        return [f"{MANIFEST} can't be read ({_reason(error)})"]
    expected = {} if manifest is None else manifest.files
    faults = [f"{name} is missing" for name in sorted({TRAINER_STATE_NAME, *expected} - files.keys())]
    if manifest is None:
        names = [*files]
        file_faults = _thread_map(_damage, files.values())
    else:
        names = [name for name in expected if name in files]
        file_faults = _thread_map(lambda name: _change(files[name], expected[name]), names)
    return faults + [f"{name} {fault}" for name, fault in zip(names, file_faults, strict=True) if fault is not None]


def run_mismatch(checkpoint: str | Path, algorithm: str, has_adapter: bool) -> str | None:
    """
    Returns an error message if the run that saved a checkpoint had another algorithm, or if only one of both runs has
    an adapter. Otherwise returns `None`.
    """
    manifest = _read_manifest(Path(checkpoint))
    folder = Path(checkpoint)
    saved_algorithm = (manifest and manifest.algorithm) or algorithm
    # The folder of an adapter has no config of the model
    is_adapter = (folder / ADAPTER_CONFIG_NAME).exists() and not (folder / CONFIG_NAME).exists()
    if saved_algorithm == algorithm and is_adapter == has_adapter:
        return None
    runs = ((saved_algorithm, is_adapter), (algorithm, has_adapter))
    labels = [f"{name!r} {'with' if with_adapter else 'without'} an adapter" for name, with_adapter in runs]
    return (
        f"{checkpoint} is of a run of {labels[0]}, and this one is of {labels[1]}; resume with the trainer and, if it "
        "had one, the adapter of that run."
    )


def resume_warnings(checkpoint: str | Path, fingerprints: dict[str, Any]) -> list[str]:
    """Returns warnings about a run that resumes from an undamaged checkpoint, on datasets with these fingerprints."""
    manifest = _read_manifest(Path(checkpoint))
    if manifest is None:
        return [f"{checkpoint} has no {MANIFEST}, so its files can't be verified."]
    warnings = []
    if manifest.model_only:
        warnings.append(
            f"{checkpoint} holds the model only (`save_only_model`), so optimizer, schedule and random numbers start "
            "anew."
        )
    for name in manifest.datasets.keys() & fingerprints.keys():
        changes = differences(manifest.datasets[name], fingerprints[name])
        if changes:
            warnings.append(
                f"`{name}` has changed since {checkpoint} was saved: {'; '.join(changes)}. The run continues on other "
                "data than an uninterrupted one would; pass the dataset as it was to resume exactly."
            )
    return warnings


class _Manifest(NamedTuple):
    algorithm: str | None
    model_only: bool
    datasets: dict[str, Any]
    files: dict[str, tuple[int, int]]  # size and checksum by name below the folder


def _read_manifest(folder: Path) -> _Manifest | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe wouldn't end
        raise OSError("it isn't a regular file")
    content = json.loads(path.read_text())
    files = {name: (int(size), int(checksum)) for name, (size, checksum) in content["files"].items()}
    return _Manifest(content.get("algorithm"), content["model_only"], content["datasets"], files)


def _files(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(MANIFEST, None)
    return files


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__


def _thread_map(function: Callable, values: Iterable) -> list:
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(function, values))


def _measure_files(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    return dict(zip(names, _thread_map(_size_and_checksum, [folder / name for name in names]), strict=True))


def _size_and_checksum(file: Path) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(_BLOCK), b""):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def _change(file: Path, entry: tuple[int, int]) -> str | None:
    """Returns how a file differs from its `entry` (size, checksum). Reads only files of equal size."""
    try:
        size = file.stat().st_size
        if size != entry[0]:
            return f"has {size} bytes, not {entry[0]}"
        return None if _size_and_checksum(file) == entry else "has other content"
    except OSError as error:
        return f"can't be read ({_reason(error)})"


def _damage(file: Path) -> str | None:
    """Checks the format of a file, for checkpoints without a manifest."""
    if file.suffix not in (".bin", ".distcp", ".json", ".pt", ".pth", ".safetensors"):
        return None
    try:
        with file.open("rb") as stream:
            start = stream.read(1)
        if not start:
            return "is empty"
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            safe_open(file, "pt")
        # `torch.save` writes zip archives. Old versions of torch wrote pickles, which start with the byte 0x80
        elif file.suffix != ".distcp" and start != b"\x80":
            with zipfile.ZipFile(file) as archive:
                return archive.testzip() and "has other content than was written"
    except Exception as error:  # the file may hold anything
        return f"can't be read ({_reason(error)})"
    return None
