# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs Python commands in children of one process that has imported everything.

Importing the trainers costs 10 CPU seconds, a short training less than a second. `Popen` and `run` work as in
`subprocess`, but a command of this interpreter (a script, `-m` or `-c`) is forked from the server of the test run. The
child has its own arguments, environment, working directory, standard streams and session. Python commands that the
child starts, such as the ranks of `torch.distributed.run`, are forked, too. Other commands run as usual.

Python starts and imports only once, in the server. Use `subprocess` itself for tests of imports, of environment
variables that imports read (`HF_HUB_OFFLINE`), and of signals to a process group or from a dying parent.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers.processes import PATIENCE


ADDRESS = "TESTS_FORK_SERVER"  # environment variable with the path of the server's socket


# Commands


class Popen(subprocess.Popen):
    """Command like `subprocess.Popen`. A command of this interpreter is forked from the server."""

    seconds = 0.0  # CPU seconds of a forked command that has ended
    _connection: socket.socket | None = None  # connection of a forked command to the server

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        words = [args] if isinstance(args, str | os.PathLike) else [*map(os.fspath, args)]
        is_script = len(words) > 1 and (words[1] in ("-u", "-m", "-c") or not words[1].startswith("-"))
        if words[0] != sys.executable or not is_script or executable or preexec_fn or pass_fds:
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        pipes = more[3:9]  # ends of stdin, stdout and stderr, each to read and to write
        # A stream without a pipe is the number of this process's stream
        streams = [end if end != -1 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = dict(os.environ if env is None else env)
        request = {"words": words[1:], "cwd": os.fspath(cwd or os.getcwd()), "environment": environment}
        self._connection = _connected()
        socket.send_fds(self._connection, [b"\n"], streams)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags):
        if self._connection is None:
            return super()._try_wait(wait_flags)
        if wait_flags == os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        # Without an answer, the server has ended, and the command counts as killed
        status, seconds = (self._answers.readline() or f"{signal.SIGKILL:d} 0").split()
        self.seconds = float(seconds)
        self._answers.close()
        self._connection.close()
        return self.pid, int(status)

    def _internal_poll(self, *args, **kwargs):
        if self._connection is None:
            return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(command, *, timeout: float = PATIENCE, check: bool = False, **options) -> subprocess.CompletedProcess:
    """Runs a command as `subprocess.run` does. Captured output is text."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    completed = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        completed.check_returncode()
    return completed


def _connected() -> socket.socket:
    """Returns a connection to the server as soon as it has imported everything."""
    if _server is not None:
        _server.start()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while connection.connect_ex(os.environ[ADDRESS]):
        if not Path(os.environ[ADDRESS]).parent.exists() or (_server is not None and _server.has_ended()):
            raise RuntimeError("The fork server ended while it imported, see above.")
        time.sleep(0.05)
    return connection


# The server of a test run


class _Server:
    """Server of the process that distributes or runs the tests. It starts when the first command needs it."""

    def __init__(self, modules: Sequence[str] = ()):
        self._modules = modules  # modules to import, by default those that most tests need
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._process: subprocess.Popen | None = None
        os.environ[ADDRESS] = str(Path(self._folder.name, "socket"))

    def start(self) -> None:
        if self._process is None:
            command = [sys.executable, Path(__file__).with_name("fork_server.py"), *self._modules]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end(self) -> None:
        """Ends the server and waits for it, so that its CPU time and its children's count as time of this process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()
        del os.environ[ADDRESS]


_server: _Server | None = None


@contextmanager
def serving(modules: Sequence[str] = (), at_once: bool = True):
    """Provides a server within the context for this process and for the processes that it starts."""
    global _server
    _server = _Server(modules)
    try:
        if at_once:
            _server.start()
        yield
    finally:
        _server.end()
        _server = None


def pytest_configure(config):
    if ADDRESS not in os.environ:  # workers inherit the server of the process that distributes the tests
        context = serving(at_once=bool(config.getoption("numprocesses", None)))
        context.__enter__()
        config.add_cleanup(lambda: context.__exit__(None, None, None))
