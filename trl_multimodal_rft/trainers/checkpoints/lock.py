# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A lock that admits one run at a time to an output folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout


logger = get_logger(__name__)

# Name of the lock in the output folder. Pushes to the Hub leave out names that start with `_`
_FILE = "_run.lock"


@contextmanager
def holding_lock(folder: str | Path) -> Iterator[str | None]:
    """
    Locks a folder against other runs within the context. Yields a text about the process that already holds the lock,
    or `None` if this process gets it.

    The kernel releases the lock however this process ends. Logs a warning if the file system has no locks.
    """
    path = Path(folder, _FILE)
    holder = None
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M}")
    except Timeout:
        holder = path.read_text() or "another process"
    except (OSError, NotImplementedError) as error:
        logger.warning(f"{str(folder)!r} can't be locked, so a second run in it will not be noticed: {error}")
    try:
        yield holder
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # before the release, as another run may then write the file
            lock.release()
