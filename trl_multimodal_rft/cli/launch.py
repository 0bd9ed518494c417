# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Commands that `accelerate launch` runs, such as `trl-multimodal-rft grpo`."""

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from types import FrameType

from ..launchers import ERROR_FOLDER_VARIABLE, name_launcher
from .options import TRACEBACK, config_path
from .preflight import check_run


# Signals that end a run, at which processes may still save a checkpoint
_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def run(name: str, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Checks the options without heavy imports, launches a script, and exits with its exit code."""
    check_run(name, args)
    config = getattr(args, "accelerate_config", None)
    words = [] if config is None else [f"--config_file={config_path('accelerate_configs', config)}"]
    launch = {option: value for option, value in getattr(args, "launch", {}).items() if value is not False}
    words += [f"--{option}" if value is True else f"--{option}={value}" for option, value in launch.items()]
    words += ["--module", "trl_multimodal_rft.cli.launched", name, *argv]
    shows_traceback = getattr(args, TRACEBACK, False)  # which `--config` may ask for
    words += ["--debug"] * (shows_traceback and "--debug" not in argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ERROR_FOLDER_VARIABLE] = folder
        try:
            exit_code, rank = _launch_and_wait(words)
        finally:
            os.environ.pop(ERROR_FOLDER_VARIABLE, None)
        files = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        was_killed = exit_code < 0 and exit_code != -signal.SIGINT and not Path(folder, str(rank)).exists()
        text = files[0].read_text(encoding="utf-8") if files else ""
    note, _, message = text.rpartition("\n")
    if note:
        print(f"\n{note}", flush=True)
    if message and not was_killed and not shows_traceback:
        raise ValueError(message)
    if was_killed:
        cause = ", as when memory runs out" if exit_code == -signal.SIGKILL else ""
        raise ValueError(f"A process was killed by {signal.Signals(-exit_code).name}{cause}.")
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _launch_and_wait(words: Sequence[str]) -> tuple[int, int]:
    """Returns the exit code, and the rank of the process with that code. Hides messages of accelerate and torch."""
    import psutil

    logging.disable(logging.ERROR)
    name_launcher()
    # Torch's launcher of several processes would kill them 30 seconds after a signal, so it gets a longer timeout
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    handlers = {signum: signal.getsignal(signum) for signum in _ENDING}
    received = []

    def wait_for_processes(signum: int, frame: FrameType | None) -> None:
        processes = psutil.Process().children()
        if not processes:
            signal.signal(signum, handlers[signum])
            signal.raise_signal(signum)
        elif signum != signal.SIGINT:  # a terminal also sends Ctrl-C to the launched processes
            received.append(signum)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)

    for signum, handler in handlers.items():
        if handler != signal.SIG_IGN:  # such as SIGHUP after `nohup`
            signal.signal(signum, wait_for_processes)
    try:
        _run_accelerate(words)
        return 0, 0
    except CalledProcessError as error:
        return 128 + received[0] if received else error.returncode, 0
    except Exception as error:  # torch's `ChildFailedError` and `SignalException`, without importing torch
        if hasattr(error, "failures"):
            rank, failure = next(iter(error.failures.items()))  # the first one
            return failure.exitcode, rank
        if hasattr(error, "sigval"):
            return 128 + error.sigval, 0
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        logging.disable(logging.NOTSET)


def _run_accelerate(words: Sequence[str]) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    args = launch_command_parser().parse_args(words)
    # Those that torch's launcher handles by default, without SIGHUP after `nohup`, at which it would end the run
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    ignored = [name for name in names if signal.getsignal(getattr(signal, name, signal.SIGINT)) == signal.SIG_IGN]
    args.signals_to_handle = ",".join(name for name in names if name not in ignored)
    launch_command(args)
