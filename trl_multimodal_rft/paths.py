# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Local paths, told apart from names on the Hub without heavy imports."""

import difflib
import os
import re
from pathlib import Path


# Extensions of configs, and of files that `datasets` reads, also compressed
_EXTENSION = re.compile(r"(?i)\.(csv|tsv|jsonl?|ndjson|parquet|arrow|txt|tar|zip|ya?ml)(\.(gz|bz2|xz|zst|lz4))?\Z")


def local_path(name: str) -> Path | None:
    """Returns the path of a local dataset or model, or `None` for a name on the Hub. Raises for a missing path."""
    if "://" in name:
        return None
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    looks_like_path = path.is_absolute() or any(part.startswith((".", "~")) for part in name.split("/"))
    if not looks_like_path and name.count("/") < 2 and not _EXTENSION.search(name):
        return None
    raise ValueError(f"There is no file or folder {name!r}; {similar_names(path)[0]}.")


def similar_names(path: Path) -> tuple[str, bool]:
    """Returns a text about names like a missing path's, in its last existing folder, and whether there are any."""
    folder = next(parent for parent in [*path.parents, Path()] if parent.is_dir())
    missing = path.relative_to(folder).parts[0]
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(missing, names, n=3)
    near += [entry for entry in names if entry not in near and Path(entry).stem == Path(missing).stem]
    content = ", ".join(map(repr, near)) if near else f"no {missing!r}"
    return f"{os.path.abspath(folder)!r} has {content}", bool(near)
