# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs `worker.py` in one or several processes, on the CPU by default, and reads their results."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers import forked
from helpers.processes import PATIENCE, end, python_command, python_environment
from safetensors.torch import load_file


HERE = Path(__file__).parent


class Run:
    """Runs scenarios of `worker.py` in the background."""

    def __init__(self, engine: str, processes: int, scenarios: list[str], folder: Path, device: str = "cpu"):
        self.engine = engine
        self.processes = processes
        self.scenarios = scenarios
        self.folder = folder
        self._shown = False  # whether the log was
        folder.mkdir()
        splits = processes > 1 or (device == "cuda" and engine != "ddp")
        # Without either, accelerate starts independent runs of one process each
        switches = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
        if engine.startswith("zero") and splits:
            switches = {"ACCELERATE_USE_DEEPSPEED": "true"}
        with (folder / "log.txt").open("w") as log:
            # A child of a process that has looked for a GPU, as imports do, can't use one
            popen = forked.Popen if device == "cpu" else subprocess.Popen
            self.process = popen(
                python_command([HERE / "worker.py", engine, folder, *scenarios], processes, splits),
                env=python_environment(TESTS_DEVICE=device, **switches),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def results(self) -> dict[str, list[dict]]:
        """Waits for the processes to end."""
        try:
            outcome = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            outcome = f"still running after {PATIENCE} s"
            self.stop()
        if outcome != 0:
            self._fail(outcome)
        return {name: [self._result(name, rank) for rank in range(self.processes)] for name in self.scenarios}

    def _fail(self, outcome: int | str) -> None:
        """Names the scenario that each process was in, before and after the log, which only the first failure has."""
        unfinished = [
            next((name for name in self.scenarios if not (self.folder / f"{name}-{rank}.json").exists()), "the end")
            for rank in range(self.processes)
        ]
        places = ", ".join(f"rank {rank} in {name}" for rank, name in enumerate(unfinished))
        log = "" if self._shown else (self.folder / "log.txt").read_text(errors="replace")
        self._shown = True
        where = f"{self.engine}: {outcome}, {places}"
        pytest.fail(f"{where}\n{log[-20_000:]}\n{where}", pytrace=False)

    def _result(self, name: str, rank: int) -> dict:
        result = json.loads((self.folder / f"{name}-{rank}.json").read_text())
        return {**result, "update": load_file(self.folder / f"{name}-{rank}.safetensors")}

    def stop(self) -> None:
        end(self.process)
