# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prefetching of rows in worker processes."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar, cast

import torch
from transformers.utils import logging

from ..reading.refs import MediaError


logger = logging.get_logger(__name__)

T = TypeVar("T")

# Seconds between checks for a worker that was killed or hangs, while a row is read
_POLL_SECONDS = 1.0
_END_SECONDS = 10.0  # seconds to wait for workers that no signal ends, such as those that read a hanging folder


class _HangingWorkers(BrokenProcessPool):
    """Error of workers that finished no row in time."""


class PrefetchPool(Generic[T]):
    """
    Pool of processes that read rows in advance, forked at the first row. If forking fails, `take` reads rows itself.

    `DataLoader` workers don't suffice: when one crashes in a decoder, torch raises in the main process at an arbitrary
    line, which ends the run without naming the row. They also need shared memory for tensors, and containers have
    little. The workers of this pool send bytes through a pipe.

    Args:
        read (`Callable`):
            Function that reads a row by its index.
        num_workers (`int`, *optional*, defaults to 1):
            Number of workers.
        patience (`Callable`, *optional*):
            Function that returns the seconds that reading a row may take, by its index. If no worker finishes a row
            in that time, as when decoders hang, all workers are killed, and the row is read once more. Called only for
            late rows.
    """

    def __init__(self, read: Callable[[int], T], num_workers: int = 1, patience: Callable[[int], float] | None = None):
        self._read = read
        self._patience = patience
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[int, Future] = {}
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._can_fork = True

    def prefetch(self, row_indices: Iterable[int]) -> None:
        """Starts to read the rows at `row_indices`, and drops all other rows."""
        old_jobs = self._jobs
        self._jobs = {}
        for row_index in dict.fromkeys(row_indices):
            self._jobs[row_index] = old_jobs.pop(row_index, None) or self._submit(row_index)
        for job in old_jobs.values():
            job.cancel()

    def is_read(self, row_index: int) -> bool:
        """Returns whether a row that was prefetched can be taken at once."""
        return self._jobs[row_index].done()

    def take(self, row_index: int) -> T:
        """Returns a row as soon as it is read, and drops it from the pool."""
        job = self._jobs.pop(row_index, None) or self._submit(row_index)
        try:
            data = self._wait_for_result(job, row_index)
        except BrokenProcessPool:
            data = self._read_alone(row_index)
        return self._read(row_index) if data is None else pickle.loads(data)

    def close(self) -> None:
        """Ends the workers, and drops all rows."""
        self._jobs = {}
        pool = self._pool
        if pool is not None:
            self._pool = None
            thread = cast(threading.Thread | None, pool._executor_manager_thread)
            result_queue = pool._result_queue
            pool.shutdown(wait=False, cancel_futures=True)
            self._kill_workers(result_queue)
            if thread is not None:  # must end first: it closes a pipe to which an exiting interpreter would write
                thread.join(timeout=_END_SECONDS)

    def _kill_workers(self, result_queue: object) -> None:
        """Kills the workers, and closes the queue in which the pool's thread would wait for the rest of a row."""
        for worker in self._workers:
            worker.kill()
        vars(result_queue)["_writer"].close()

    def _wait_for_result(self, job: Future, row_index: int) -> bytes | None:
        """
        Returns a pickled row, or `None` for a row that this process must read itself. Raises a `BrokenProcessPool` if
        a worker was killed, or if all workers hang.
        """
        last_progress = time.monotonic()
        n_read = -1
        max_seconds = None
        while not wait([job], timeout=_POLL_SECONDS).done:
            if self._pool is None:  # the pool broke, so the job is about to raise an error
                continue
            n_read_before = n_read
            n_read = sum(other_job.done() for other_job in self._jobs.values())
            if n_read != n_read_before:
                last_progress = time.monotonic()  # workers are reading earlier rows
            error: type[BrokenProcessPool] = BrokenProcessPool
            if all(worker.is_alive() for worker in self._workers):
                max_seconds = (
                    self._patience(row_index) if max_seconds is None and self._patience is not None else max_seconds
                )
                if max_seconds is None or time.monotonic() - last_progress < max_seconds:
                    continue
                error = _HangingWorkers
            self._kill_workers(self._pool._result_queue)
            raise error
        return job.result()

    def _read_alone(self, row_index: int) -> bytes | None:
        """Reads a row again, alone, after a worker died. The pool lost all rows, and this row may be the cause."""
        other_row_indices = list(self._jobs)
        self.close()
        try:
            return self._wait_for_result(self._submit(row_index), row_index)
        except _HangingWorkers as error:
            self.close()
            raise MediaError(
                f"row {row_index}: reading its media timed out twice, as a decoder or a folder may hang; remove the "
                "row, or raise `media_timeout`"
            ) from error
        except BrokenProcessPool as error:
            self.close()
            raise MediaError(
                f"row {row_index}: the process that decoded its media was killed, because a decoder crashed or memory "
                "ran out; remove the row, or encode its media again"
            ) from error
        finally:
            self.prefetch(other_row_indices)

    def _submit(self, row_index: int) -> Future:
        while self._can_fork:
            try:
                if self._pool is None:
                    return self._fork_workers(row_index)
                return self._pool.submit(_read_and_pickle, row_index)
            except BrokenProcessPool:  # a worker was killed while it read another row
                self._pool = None
            except OSError as error:  # raised by `fork`
                logger.warning(f"Media prefetching is disabled, as no worker can be forked: {error}")
                self._can_fork = False
                self._pool = None
        empty_job: Future = Future()  # for `None`, `take` reads the row itself
        empty_job.set_result(None)
        return empty_job

    def _fork_workers(self, row_index: int) -> Future:
        gc_enabled = gc.isenabled()
        initial_arguments = (self._read, gc_enabled)
        self._pool = ProcessPoolExecutor(
            self._num_workers, multiprocessing.get_context("fork"), _start_worker, initial_arguments
        )
        gc.disable()  # workers start with a disabled collector, until `_start_worker` has frozen what they inherit
        try:
            return self._pool.submit(_read_and_pickle, row_index)
        finally:
            if gc_enabled:
                gc.enable()
            self._workers = [*self._pool._processes.values()]


_read: Callable[[int], object]  # set in a worker by `_start_worker`


def _start_worker(read: Callable[[int], object], gc_enabled: bool) -> None:
    global _read
    _read = read
    gc.freeze()  # a fork can't free the parent's tensors on a GPU, so no collection may reach what it inherits
    if gc_enabled:
        gc.enable()
    torch.set_num_threads(1)  # a fork has one thread, so torch's thread pool doesn't exist here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # a launcher's signals to the whole group are handled by the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _read_and_pickle(row_index: int) -> bytes | None:
    result = _read(row_index)
    try:
        return pickle.dumps(result, protocol=5)  # for tensors, five times as fast as the default
    except (pickle.PicklingError, TypeError, AttributeError):  # decoders can't be pickled
        return None
