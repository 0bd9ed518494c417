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
    # A name on the Hub has at most one slash
    looks_like_path = path.is_absolute() or any(part.startswith((".", "~")) for part in name.split("/"))
    if not looks_like_path and name.count("/") < 2 and not _EXTENSION.search(name):
        return None
    raise ValueError(f"There is no file or folder {name!r}; {similar_names(path)[0]}.")


def names_reward_model(text: str) -> bool:
    """Returns whether an entry of `--reward_funcs` names a model, in a folder or on the Hub, and no function."""
    folder = Path(os.path.expanduser(text))
    has_config = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return not re.search(r"\)\Z|\.py(:\w+)?\Z", text) and (has_config or "/" in text)


def check_not_overwritten(output_dir: str, name: str | None) -> None:
    """Raises a `ValueError` if a run would write its model over the one in the folder `name`."""
    folder = "" if name is None else os.path.expanduser(name)
    if os.path.isdir(folder) and os.path.realpath(folder) == os.path.realpath(os.path.expanduser(output_dir)):
        raise ValueError(
            f"`output_dir` is {output_dir!r}, the folder of the model {name!r}, which the run would overwrite; name "
            "another folder."
        )


def similar_names(path: Path) -> tuple[str, bool]:
    """Returns a text on similar names in a missing path's deepest existing folder, and whether there are any."""
    folder = next(parent for parent in [*path.parents, Path()] if parent.is_dir())
    missing_name = path.relative_to(folder).parts[0]
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    matches = difflib.get_close_matches(missing_name, names, n=3)
    # Names that differ only in their extension are similar, too
    matches += [entry for entry in names if entry not in matches and Path(entry).stem == Path(missing_name).stem]
    content = ", ".join(map(repr, matches)) if matches else f"no {missing_name!r}"
    return f"{os.path.abspath(folder)!r} has {content}", bool(matches)
