# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`run.yaml` in the output folder of a run: the options that the user set, so that `--config` repeats the run."""

import itertools
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..credentials import without_secrets
from .options import TRACEBACK


FILE_NAME = "run.yaml"

_FIRST_ENTRIES = ("model_name_or_path", "dataset_name", "output_dir")
# Options that a repetition of the run must not copy
_TRANSIENT = {"config", "resume_from_checkpoint", "dry_run", "launch", TRACEBACK}


def write_run_file(folder: str | Path, command: str, options: Mapping[str, Any], resumed: bool = False) -> None:
    """
    Writes the options that the user set. A resumed run replaces the file, but keeps its `max_steps`. Any other run
    renames an earlier run's file with other options to `run-1.yaml`, or to the next free number.
    """
    entries = {**options, **options.get("launch", {})}
    path = Path(folder, FILE_NAME)
    if resumed:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):  # a user may have edited the file
            max_steps = yaml.safe_load(path.read_text(encoding="utf-8")).get("max_steps")
            entries.pop("max_steps", None)
            entries |= {} if max_steps is None else {"max_steps": max_steps}
    # The most important options come first
    entries = {
        name: entries[name]
        for name in dict.fromkeys([*_FIRST_ENTRIES, *entries])
        if name in entries and name not in _TRANSIENT
    }
    for name, value in entries.items():
        if name.endswith("_steps") and isinstance(value, float) and value.is_integer():  # below 1, it is a share
            entries[name] = int(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(without_secrets(entries), sort_keys=False, allow_unicode=True, width=119)
    text = f"# {command} --config {shlex.quote(str(path))}\n{text}"
    if not resumed and path.exists() and path.read_bytes() != text.encode():
        candidates = (Path(folder, f"run-{i}.yaml") for i in itertools.count(1))
        path.rename(next(candidate for candidate in candidates if not candidate.exists()))
    path.write_text(text, encoding="utf-8")
