# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs the tests with vLLM's engine: `python tests/engine`, those of files, `python tests/engine test_tools.py`, or with
`-m slow` the slow ones. Other options, such as `--durations=20`, are pytest's, whose output is then printed.

Each file has a process of its own, as engines leave memory behind, but for groups that share a server or models. These
processes, and the servers of tests, are forked from one that has imported vLLM, which takes 20 CPU seconds. The first
that fails ends the rest, so that its output comes last, except with `--write-results`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest


TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "shims")])

import weekly  # noqa: E402
from helpers import cpu_seconds, forked  # noqa: E402


IMPORTED = ["vllm_cpu", "vllm", "vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server", "helpers.families"]
IMPORTED += ["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2_5_omni_thinker"]
IMPORTED += [f"trl_multimodal_rft.trainers.{name}_trainer" for name in ("grpo", "rloo", "ppo", "distillation", "sft")]
IMPORTED += ["trl_multimodal_rft.evaluation"]
PYTEST = [sys.executable, "-m", "pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported already
AT_ONCE = 2
# Groups of files that share a server, or models and their engines
TOGETHER = [
    [f"engine/test_{name}.py" for name in ("asynchronous", "answers", "processes", "server", "servers")],
    [f"engine/test_{name}.py" for name in ("colocate", "config", "positions", "self_check", "tools")],
    [f"engine/test_{name}.py" for name in ("engine_budgets", "engine_evaluation", "engine_offload", "weights")],
]
ELSEWHERE = ["test_harness_programs.py"]  # `make test-extras`


def run(files: list[str], options: list[str]) -> tuple[str, int, str, dict]:
    """Returns names of files with their exit code, their output and their results, as `--write-results` has them."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, Path(files[0]).stem)
        options = [*options, "--write-results", str(written)]
        with forked.Popen([*PYTEST, *(f"tests/{file}" for file in files), *options], **streams) as process:
            output, _ = process.communicate()
        results = weekly.results_of(written)
    seconds = dict.fromkeys(files, 0.0) | results["seconds"]
    seconds[files[0]] += process.seconds - sum(seconds.values())  # imports, and the collection of tests
    return ", ".join(files), process.returncode, output, {**results, "seconds": seconds}


def main() -> str:
    """Returns an error, or nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__.strip().splitlines()[0],
        epilog="Names of files, by default all, and further options are those of pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="expression", default="not slow", help="as that of pytest")
    parser.add_argument("--write-cpu-seconds", action="store_true", help="store the CPU seconds of each file")
    parser.add_argument("--write-results", type=Path, help="file for the results, see `weekly.py`")
    args, words = parser.parse_known_args()
    names = [word for word in words if Path(__file__).parent.joinpath(word).is_file()]
    others = [word for word in words if word not in names]
    options = ["-m", args.expression, *others]
    suite = "vllm slow" if args.expression == "slow" else "vllm"
    stored = json.loads(cpu_seconds.STORED.read_text()).get(suite, {})
    names = names or [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in ELSEWHERE]
    files = [f"engine/{name}" for name in names]
    if args.expression == "slow":  # others have none
        files = [file for file in files if "slow" in (TESTS / file).read_text()]
    together = [[file for file in group if file in files] for group in TOGETHER]
    groups = [*together, *([file] for file in files if not any(file in group for group in together))]
    groups.sort(key=lambda group: -sum(stored.get(file, 0) for file in group))
    found, failed = [], ""
    with ThreadPoolExecutor(AT_ONCE) as pool, forked.serving(IMPORTED):
        for done in as_completed([pool.submit(run, group, options) for group in groups if group]):
            group, code, output, results = done.result()
            found, seconds = [*found, results], sum(results["seconds"].values())
            counts = re.findall(r"^.*\d (?:passed|skipped|deselected).*$", output, re.MULTILINE)  # among other output
            print(output if code or others else f"{group}: {counts[-1]}, {seconds:.0f} CPU s", flush=True)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                failed = f"{failed} {group} failed".strip()
                if not args.write_results:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return failed
    if args.write_cpu_seconds:
        cpu_seconds.store(suite, weekly.joined(found)["seconds"])
    if args.write_results:
        args.write_results.write_text(json.dumps(weekly.joined(found)))
    return failed


if __name__ == "__main__":
    sys.exit(main() or None)
