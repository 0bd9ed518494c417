# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Launched processes end with their launcher, and soon after an error of another process."""

import atexit
import json
import os
import platform
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from .credentials import masked


# Environment variable with the host and the process id of the command that launches processes
_LAUNCHED_BY = "TRL_MULTIMODAL_RFT_LAUNCHED_BY"

# Environment variable with the folder in which each process that an error ends leaves a file with its last lines. The
# command shows those of the first one.
ERROR_FOLDER_VARIABLE = "TRL_MULTIMODAL_RFT_ERRORS"
# Set by torch's launcher: the file from which it shows the error of this process, beside those of the other processes
_TORCH_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_GRACE = 5.0  # seconds after an error of another process, in which this one may end by itself
# In errors of a collective, by gloo or NCCL, about a process that is gone
_LOST = re.compile(r"gloo|NCCL|ProcessGroup|[Cc]onnection (?:closed|reset|refused)|Broken pipe")
_WATCH = "trl_multimodal_rft.end_with_others"  # name of a thread

# Programs and Python modules that start processes and wait for them
_LAUNCHERS = {
    "trl-multimodal-rft",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
}


def name_launcher() -> None:
    """Names this process as the launcher of those that it starts, in their environment."""
    os.environ[_LAUNCHED_BY] = f"{platform.node()}:{os.getpid()}"


def end_with_launcher() -> None:
    """
    Makes this process receive SIGTERM when the launcher that started it ends for any reason, or now if it has ended
    already. If a launcher is killed, nothing else stops its processes, and they would continue. Has an effect on Linux
    only.
    """
    host, _, process_id = os.environ.get(_LAUNCHED_BY, "").rpartition(":")
    launchers = set() if _PARENT_LAUNCHER is None else {_PARENT_LAUNCHER}
    if process_id and host == platform.node():
        launchers.add(int(process_id))
    if os.getppid() in launchers or _is_launcher(os.getppid()):
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyrefly: ignore[missing-module-attribute]

        _prctl_pr_set_pdeathsig(signal.SIGTERM)
    if Path("/proc/self").exists() and not all(map(_is_running, launchers)):
        signal.raise_signal(signal.SIGTERM)


def error_file() -> Path | None:
    """Returns the file for the last lines of this process, if a command has launched it."""
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    return None if folder is None else Path(folder, os.environ.get("RANK", "0"))


def another_failed() -> bool:
    """Returns whether an error has ended another process of this machine, and none this one."""
    own_file, files = _error_files()
    return own_file is not None and not own_file.exists() and bool(files)


def follows_another(error: BaseException) -> bool:
    """Returns whether an error is that of a connection to a process that another error has ended."""
    is_lost = isinstance(error, RuntimeError) and (_LOST.search(str(error)) or type(error).__name__.startswith("Dist"))
    return bool(is_lost) and another_failed()


def end_with_others() -> None:
    """
    Ends this process soon after an error of another one. It may wait for that one in a collective, where no signal
    reaches it.
    """

    def watch() -> None:
        while not another_failed() or any(map(_script_runs, _error_files()[1])):
            time.sleep(0.5)
        time.sleep(_GRACE)
        if another_failed():
            os._exit(1)

    is_watched = any(thread.name == _WATCH for thread in threading.enumerate())
    if not is_watched and _error_files()[0] is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def report_error(
    kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    """
    Reports the error of a run to torch's launcher, which shows it last, and to the other processes, which end without
    a traceback. For [`contextlib.ExitStack.push`]. Does nothing within a command.
    """
    file = os.environ.get(_TORCH_ERROR_FILE)
    if not isinstance(error, Exception) or not file or error_file() is not None:
        return
    if follows_another(error):
        sys.exit(1)
    lines = masked("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
    facts = {"py_callstack": lines, "timestamp": str(int(time.time())), "process_id": os.getpid()}
    unfinished = Path(f"{file}.unfinished")
    with suppress(OSError):  # as on a full disk, which may be the error
        unfinished.write_text(json.dumps({"message": {"message": lines, "extraInfo": facts}}), encoding="utf-8")
        unfinished.replace(file)
        atexit.register(_forget_error, Path(file))


def _forget_error(file: Path) -> None:
    """Removes the file of an error that the script has handled, so that other processes needn't end."""
    if getattr(sys, "last_value", None) is None:
        file.unlink(missing_ok=True)


def _error_files() -> tuple[Path | None, list[Path]]:
    """Returns the file of this process, if a launcher names one, and those that processes of this machine wrote."""
    own_file = error_file()
    if own_file is not None:
        return own_file, list(own_file.parent.glob("*"))
    name = os.environ.get(_TORCH_ERROR_FILE)
    if not name:  # empty if the launcher writes no logs
        return None, []
    own_file = Path(name)
    return own_file, list(own_file.parents[1].glob(f"*/{own_file.name}"))


def _script_runs(file: Path) -> bool:
    """Returns whether the process of an error's file still runs, as its script may save something after the error."""
    if error_file() is None:
        with suppress(OSError, ValueError, KeyError):
            return _is_running(json.loads(file.read_text(encoding="utf-8"))["message"]["extraInfo"]["process_id"])
    return False


def end_without_teardown() -> None:
    """After an error of any process, ends this one without the teardown of all modules, which takes seconds."""
    file = error_file()
    if file is not None and any(file.parent.glob("*")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _is_launcher(process_id: int) -> bool:
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:  # not Linux, or a process that this one can't see
        return False
    words = command.decode(errors="replace").split("\0")
    return bool({Path(word).name for word in words[:3]} & _LAUNCHERS)  # later words may be arguments


def _is_running(process_id: int) -> bool:
    """A process that has ended may stay as a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The launcher at the time of this import: a process that starts later may already have another parent
_PARENT_LAUNCHER = os.getppid() if _is_launcher(os.getppid()) else None
