# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows that other processes read before they are needed."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from transformers.utils import logging

from .columns import MediaError


logger = logging.get_logger(__name__)


class ReadAhead:
    """
    Reads rows in other processes, which are copies of this one, made when the first row is asked for.

    Processes, since threads would hold up the one that feeds an accelerator. What they read comes back as a sequence
    of bytes: tensors in shared memory need a file descriptor each, and more of that memory than containers have. Where
    the machine has no room for a copy of this process, rows are read here when they are taken.
    """

    def __init__(self, read: Callable[[int], Any], num_workers: int = 1):
        self._read = read
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[int, Future] = {}
        self._has_room = True

    def want(self, rows: Iterable[int]) -> None:
        """Has these rows read, and forgets others."""
        before, self._jobs = self._jobs, {}
        for row in dict.fromkeys(rows):
            self._jobs[row] = before.pop(row, None) or self._submit(row)
        for job in before.values():
            job.cancel()

    def take(self, row: int) -> Any:
        """What was read of a row, which is forgotten here."""
        job = self._jobs.pop(row, None) or self._submit(row)
        try:
            found = job.result()
        except BrokenProcessPool:
            found = self._alone(row)
        return self._read(row) if found is None else pickle.loads(found)

    def close(self) -> None:
        """Ends the processes, and forgets all rows."""
        self._jobs = {}
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _alone(self, row: int) -> bytes | None:
        """After a process was killed, with which all rows are lost: by itself, a row shows whether it is at fault."""
        others = list(self._jobs)
        self.close()
        try:
            return self._submit(row).result()
        except BrokenProcessPool as error:
            self.close()
            raise MediaError(
                f"row {row}: the process that decoded its media was killed, by a decoder that crashed or for want of "
                "memory; take the row out, or write its media again"
            ) from error
        finally:
            self.want(others)

    def _submit(self, row: int) -> Future:
        if self._has_room:
            try:
                return self._workers().submit(_work, row)
            except BrokenProcessPool:  # killed since, by no fault of this row
                self._pool = None
                return self._submit(row)
            except OSError as error:  # of the system call that copies this process
                logger.warning(f"Media aren't read ahead of need from here on, for want of memory: {error}")
                self._has_room, self._pool = False, None
        here: Future = Future()
        here.set_result(None)
        return here

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(self._read,),
            )
        return self._pool


_read: Callable[[int], Any]


def _begin(read: Callable[[int], Any]) -> None:
    global _read
    _read = read
    torch.set_num_threads(1)  # the others of the parent aren't here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # what a launcher sends to all is for the parent, too
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(row: int) -> bytes | None:
    found = _read(row)
    try:
        return pickle.dumps(found)
    except (pickle.PicklingError, TypeError, AttributeError):  # such as decoders
        return None
