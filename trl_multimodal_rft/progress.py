# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Progress bars for terminals and notebooks, and messages above the bars."""

import os
import sys
from importlib import import_module

from tqdm.auto import tqdm

from .printable import printable


def in_notebook() -> bool:
    """Returns whether this process runs in a notebook. Imports transformers only if IPython is imported."""
    return "IPython" in sys.modules and import_module("transformers.utils").is_in_notebook()


def is_watched() -> bool:
    """Returns whether this is the main process, and its output goes to a notebook or a terminal."""
    return os.environ.get("RANK", "0") == "0" and (in_notebook() or sys.stderr.isatty())


def progress_bar(
    total: int | None, label: str, unit: str = "row", *, disable: bool | None = False, initial: int = 0
) -> tqdm:
    """Returns a bar that vanishes when it closes. `disable` (the option `disable_tqdm`) or `TQDM_DISABLE` hides it."""
    hidden = {"disable": True} if disable or not is_watched() else {}
    return tqdm(desc=label, total=total, unit=unit, initial=initial, leave=False, dynamic_ncols=True, **hidden)


def print_above_bars(*lines: str) -> None:
    tqdm.write(printable("\n".join(lines)))
    sys.stdout.flush()


def announce(text: str) -> None:
    """Prints to a notebook or a terminal that a step of some seconds begins, such as `loading the model ...`."""
    if is_watched():
        tqdm.write(printable(f"{text} ..."), file=sys.stderr)
