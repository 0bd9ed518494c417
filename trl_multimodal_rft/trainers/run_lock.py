# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One run at a time in an output folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from accelerate.logging import get_logger


try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


logger = get_logger(__name__)

# In the output folder; pushes leave out what begins so
_FILE = "_run.lock"


@contextmanager
def holding(folder: str | Path) -> Iterator[str | None]:
    """
    Keeps other processes from training in a folder within the context.

    The kernel releases the lock when this process ends, however it does, and forked workers don't inherit it. Where
    the file system has no locks, a warning says so.
    """
    path = Path(folder, _FILE)
    file = holder = None
    try:
        file = _locked(path)
    except BlockingIOError:
        with suppress(OSError):
            holder = path.read_text()
        holder = holder or "another process"
    except OSError as error:
        logger.warning(f"{str(folder)!r} can't be locked, so a second run in it will not be noticed: {error}")
    try:
        yield holder
    finally:
        if file is not None:
            if _is_at(file, path):
                path.unlink()
            file.close()


def _locked(path: Path) -> TextIO | None:
    """The locked file, which says who holds it; `None` where Python has no locks."""
    if fcntl is None:
        return None
    while True:
        file = path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M}")
                file.flush()
                return file
        except OSError:
            file.close()
            raise
        file.close()


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still there: who held it may have removed it since, or somebody the whole folder."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
