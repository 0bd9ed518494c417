# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs `worker.py` in one or several processes, on the CPU by default, and reads their results."""

import json
import subprocess
from pathlib import Path

from helpers.processes import end, python_command, python_environment
from safetensors.torch import load_file


HERE = Path(__file__).parent


class Run:
    """Runs scenarios of `worker.py` in the background."""

    def __init__(self, engine: str, processes: int, scenarios: list[str], folder: Path, device: str = "cpu"):
        self.processes, self.scenarios, self.folder = processes, scenarios, folder
        folder.mkdir()
        splits = processes > 1 or (device == "cuda" and engine != "ddp")
        # Without either, accelerate starts independent runs of one process each
        switches = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
        if engine.startswith("zero") and splits:
            switches = {"ACCELERATE_USE_DEEPSPEED": "true"}
        with (folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                python_command([HERE / "worker.py", engine, folder, *scenarios], processes, splits),
                env=python_environment(TESTS_DEVICE=device, **switches),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self, timeout: float) -> dict[str, list[dict]]:
        """Waits for the processes to end."""
        try:
            outcome = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            outcome = f"still running after {timeout} s"
            self.stop()
        output = (self.folder / "log.txt").read_text(errors="replace")
        assert outcome == 0, f"{self.processes} processes of {self.scenarios}: {outcome}\n{output[-8000:]}"
        return {name: [self._result(name, rank) for rank in range(self.processes)] for name in self.scenarios}

    def _result(self, name: str, rank: int) -> dict:
        result = json.loads((self.folder / f"{name}-{rank}.json").read_text())
        return {**result, "update": load_file(self.folder / f"{name}-{rank}.safetensors")}

    def stop(self) -> None:
        end(self.process)
