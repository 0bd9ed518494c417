# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Comparisons of expressions in a separate process, which ends if a comparison takes too long.

The process runs this file alone, so the file must not import the package. It isn't a process of `multiprocessing`,
which would run the user's script again.
"""

import atexit
import faulthandler
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading


LIMIT = 3.0  # seconds per comparison; most take a few milliseconds
_MEMORY = 4 * 2**30  # limit on the address space of the process, in bytes


def equal(answer: str, reference: str) -> bool:
    """Returns whether math-verify finds two expressions equal, in any thread. The first call starts the process."""
    return _comparer(os.getpid()).equal(answer, reference)


class _Comparer:
    """Owner of the process that compares expressions. The first comparison starts the process."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def equal(self, answer: str, reference: str) -> bool:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start_process()
            process = self._process
            verdict = ""
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([answer, reference]) + "\n")
                process.stdin.flush()
                verdict = _read_line(process)
            except BrokenPipeError:
                pass  # the process was killed
            finally:
                if not verdict:  # a late verdict would be read as the verdict of the next comparison
                    self.close()
            return verdict == "equal"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def _comparer(process_id: int) -> _Comparer:
    """Returns the comparer of a process. A forked process needs a new one, as it would share its parent's pipes."""
    comparer = _Comparer()
    atexit.register(comparer.close)
    return comparer


def _start_process() -> subprocess.Popen:
    """Starts a process that compares expressions, and waits until the process has imported math-verify."""
    # `-P` keeps this file's folder off the path, as its modules would hide installed modules of the same names
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    if _read_line(process) != "ready":
        process.kill()
        process.communicate()
        raise RuntimeError("math-verify can't be imported; `python -c 'import math_verify'` shows why.")
    return process


def _read_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _differ(*parsed: list) -> bool:
    """Returns whether small numbers, which are all 0 for math-verify, differ in their first six significant digits."""
    values = []
    for candidates in parsed:
        try:
            values.append(float(getattr(candidates[0], "rhs", candidates[0])))
        except Exception:  # not a number
            return False
    return max(map(abs, values)) < 1e-4 and len({f"{value:.5e}" for value in values}) > 1


def _compare_lines() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts
    if sys.platform != "win32":
        import resource

        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _MEMORY if hard_limit == resource.RLIM_INFINITY else min(_MEMORY, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    from math_verify import parse, verify

    logging.disable()
    # Libraries print to stderr, so that only replies are in the pipe to the parent process
    replies = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=replies, flush=True)
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            # A watchdog thread ends the process after the limit, even while a C library runs
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=nowhere)
            guess, gold = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
            is_equal = bool(gold) and bool(guess)
            is_equal = is_equal and verify(gold, guess, timeout_seconds=None) and not _differ(gold, guess)
            faulthandler.cancel_dump_traceback_later()
            print("equal" if is_equal else "other", file=replies, flush=True)


if __name__ == "__main__":
    _compare_lines()
