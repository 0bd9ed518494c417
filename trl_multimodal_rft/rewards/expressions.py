# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Whether two expressions are equal, in a process of their own, which is given up where that takes too long.

This file is also what the process runs, by its path: it imports nothing of the package, and math-verify alone. It is
no child of `multiprocessing`, which would run the user's script again.
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
from typing import Any


# For one comparison, in seconds; most take a few milliseconds
LIMIT = 3.0

# What a comparison may take of the machine's memory, in bytes
_MEMORY = 4 * 2**30


def equal(answer: str, reference: str) -> bool:
    """
    Compares two expressions with math-verify, from any thread.

    The process that does it is started by the first call, and ends with this one.
    """
    return _comparer(os.getpid()).equal(answer, reference)


class _Comparer:
    """A process that compares, started by the first comparison."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def equal(self, answer: str, reference: str) -> bool:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start()
            process = self._process
            questions: Any = process.stdin
            verdict = ""
            try:
                questions.write(json.dumps([answer, reference]) + "\n")
                questions.flush()
                verdict = _read(process)
            except BrokenPipeError:
                pass  # it was killed
            finally:
                if not verdict:  # what it still says would be taken for the answer to the next question
                    self.close()
            return verdict == "equal"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def _comparer(process: int) -> _Comparer:
    """That of a process: those that are forked have their own."""
    comparer = _Comparer()
    atexit.register(comparer.close)
    return comparer


def _start() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    if _read(process) != "ready":
        process.kill()
        process.communicate()
        raise RuntimeError("math-verify can't be imported; `python -c 'import math_verify'` says why.")
    return process


def _read(process: subprocess.Popen) -> str:
    answers: Any = process.stdout
    return answers.readline().strip()


def _serve() -> None:
    """Answers questions until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the process that asks
    if sys.platform != "win32":
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    from math_verify import parse, verify

    logging.disable()
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            # Ends the process from another thread, even while a C library runs
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=nowhere)
            guess, gold = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
            is_equal = bool(gold) and bool(guess) and verify(gold, guess, timeout_seconds=None)
            faulthandler.cancel_dump_traceback_later()
            print("equal" if is_equal else "other", file=answers, flush=True)


if __name__ == "__main__":
    _serve()
