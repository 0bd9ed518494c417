# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Starts `worker.py` in one or several processes, on the CPU, and reads what each of them wrote."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file


HERE = Path(__file__).parent


class Run:
    """
    A worker that runs scenarios in `processes` processes, started at once and in the background.

    Args:
        engine (`str`):
            `"ddp"` or `"fsdp2"`; without effect on a single process.
        processes (`int`):
            Number of processes, talking through gloo.
        scenarios (`list[str]`):
            Names of functions of `worker.py`, run in turn by the same processes: importing takes them longer than most
            scenarios do.
        folder (`Path`):
            Where results and logs go.
    """

    def __init__(self, engine: str, processes: int, scenarios: list[str], folder: Path):
        self.processes = processes
        self.scenarios = scenarios
        self.folder = folder
        self.log = folder / "log.txt"
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
            command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        env = {
            **os.environ,
            "ACCELERATE_USE_CPU": "true",  # otherwise accelerate starts independent runs of one process each
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(HERE / "worker.py"), engine, str(folder), *scenarios],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self, timeout: float) -> dict[str, list[dict]]:
        """
        Waits for the processes.

        Args:
            timeout (`float`):
                Seconds after which they are killed: processes that wait for each other would do so forever.

        Returns:
            `dict[str, list[dict]]`: What each scenario returned, by process.

        Raises:
            `AssertionError`: If they fail or take too long, with the end of their output.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout} s"
        finally:
            self.stop()
        if code != 0:
            raise AssertionError(f"{self.process.args}: {code}\n{self.log.read_text()[-6000:]}")
        return {scenario: [self._result(scenario, rank) for rank in range(self.processes)] for scenario in self.scenarios}

    def stop(self) -> None:
        """Ends the processes, if they still run."""
        self.process.terminate()  # torchrun answers by ending its workers, which are in sessions of their own
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _result(self, scenario: str, rank: int) -> dict:
        stem = self.folder / f"{scenario}-{rank}"
        return {**json.loads(stem.with_suffix(".json").read_text()), "update": load_file(stem.with_suffix(".safetensors"))}
