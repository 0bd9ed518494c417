# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Starts a vLLM server in a separate process, and trains in several processes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from helpers import forked
from helpers.processes import PATIENCE, end, free_port, python_command, python_environment
from trl.import_utils import is_vllm_available


SHIM = Path(__file__).parents[2] / "shims/vllm_cpu.py"
FLAGS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
    *("--max-model-len", "512", "--max-num-seqs", "16", "--num-gpu-blocks-override", "2048"),
    *("--logprobs-mode", "processed_logprobs"),
    *(["--enable-scale-out"] if is_vllm_available(min_version="0.30.0") else []),
]


@contextmanager
def serve(model: Path, folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """Yields the address of a server that runs within the context. It takes a minute to start."""
    port = free_port()
    log = folder / "server.txt"
    # `vllm serve` looks for a distribution of that name
    command = [sys.executable, str(SHIM), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--port", str(port)]
    with log.open("w") as output:
        process = forked.Popen(
            [*command, *FLAGS, *flags],
            env=python_environment(VLLM_SERVER_DEV_MODE="1", **environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, log)
        yield address
    finally:
        end(process)


def _wait(address: str, process: subprocess.Popen, log: Path, seconds: int = PATIENCE) -> None:
    for _ in range(seconds):
        try:
            return requests.get(f"{address}/health", timeout=5).raise_for_status()
        except requests.RequestException:
            assert process.poll() is None, log.read_text()[-8000:]
            time.sleep(1)
    raise AssertionError(f"no server after {seconds} s\n{log.read_text()[-8000:]}")


def train(
    model: Path, folder: Path, processes: int, runs: dict[str, dict], worker: str = "worker.py", **environment: str
) -> dict[str, list[dict]]:
    """Returns the results of each process of a script by the name of the run, from each run's options."""
    log = folder / "worker.txt"
    script = [Path(__file__).with_name(worker), folder, model, json.dumps(runs)]
    with log.open("w") as output:
        process = forked.Popen(
            python_command(script, processes),
            env=python_environment(**environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        outcome = process.wait(PATIENCE)
    finally:
        end(process)
    assert outcome == 0, log.read_text()[-8000:]
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(processes)] for name in runs
    }
