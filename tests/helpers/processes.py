# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Commands and environments of scripts that run in one or several other processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


TESTS = Path(__file__).parent.parent
# Seconds that tests wait for a process, and that ranks wait for each other. Even on a busy machine, only a process
# that hangs takes so long.
PATIENCE = 1800
COLLECTIVE = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python_command(script: Sequence[str | Path], processes: int = 1, is_group: bool = False) -> list[str]:
    """Returns a command for a script with arguments. `is_group` starts a process group even of one process."""
    launcher = []
    if processes > 1 or is_group:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        launcher += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    return [sys.executable, *launcher, *map(str, script)]


def python_environment(**more: str) -> dict[str, str]:
    """Returns an environment in which processes find the modules of the tests."""
    folders = [str(TESTS), str(TESTS / "distributed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),  # DeepSpeed needs ninja
        "PYTHONPATH": os.pathsep.join(folders),
        **more,
    }


def end(process: subprocess.Popen) -> None:
    """Terminates a launcher. A kill would orphan its workers, which run in other sessions."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
