# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs TRL's tests of its trainers, and compares what fails with the list of `known.py`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .known import KNOWN, TRL_FAILS, WITH_SELF_CHECK, Reason


TESTS = Path(__file__).resolve().parents[1]
FILES = {
    "dpo": ["test_dpo_trainer.py"],
    "kto": ["test_kto_trainer.py"],
    "reward": ["test_reward_trainer.py"],
    "sft": ["test_sft_trainer.py"],
    "grpo": ["test_grpo_trainer.py"],
    "rloo": ["test_rloo_trainer.py"],
    "distillation": ["test_distillation_trainer.py", "experimental/test_distillation_trainer.py"],
}
_MAKE = "import pathlib, sys, trl_suite.stand_ins as s; s.make_stand_ins(*map(pathlib.Path, sys.argv[1:]))"


def run(
    checkout: Path,
    work: Path,
    trainers: list[str],
    *,
    with_trl: bool = False,
    self_check: bool = True,
    select: str = "",
) -> dict[str, dict]:
    """Returns results of TRL's tests by name, such as `test_dpo_trainer.py::TestDPOTrainer::test_train`."""
    cache = work / "hub"
    copy = work / "suite"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TRL_SUITE_CLASSES": "trl" if with_trl else "",
        "TRL_SUITE_SELF_CHECK": "1" if self_check else "0",
    }
    make = [sys.executable, "-c", _MAKE, str(checkout), str(cache)]
    subprocess.run(make, env=environment, check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkout / "tests", copy / "tests")
    (copy / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    distributed\n")
    results: dict[str, dict] = {}
    for file in (file for trainer in trainers for file in FILES[trainer]):
        if not (copy / "tests" / file).exists():
            continue
        output = work / "results.json"
        log = work / f"{Path(file).stem}.log"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", f"tests/{file}", "-p", "trl_suite.plugin", "-m", "not slow"]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-k", select] if select else []
        with log.open("w") as lines:
            options = {"cwd": copy, "env": {**environment, "TRL_SUITE_RESULTS": str(output)}}
            status = subprocess.run(command, stdout=lines, stderr=subprocess.STDOUT, **options).returncode
        # 0 and 1: all tests ran; 5: no test has a name of `select`. With others, tests are missing from the results
        if status not in (0, 1) and not (status == 5 and select):
            raise RuntimeError(f"{file}: pytest ended with status {status}, before all tests had run; see {log}.")
        if status != 5 and not output.exists():
            raise RuntimeError(f"{file} has no results; see {log}.")
        if not output.exists():
            continue
        results |= json.loads(output.read_text())
    return results


def known_failures(*, with_trl: bool = False, self_check: bool = True) -> dict[str, Reason]:
    """Returns the tests that can't pass with TRL's or this package's trainers, with their reasons."""
    ours = {} if with_trl else {**KNOWN, **(WITH_SELF_CHECK if self_check else {})}
    return {**TRL_FAILS, **ours}


def unexpected(results: dict[str, dict], known: dict[str, Reason]) -> dict[str, str]:
    """
    Returns what fails and isn't known, what fails with another error than is known, and what is known and passes, by
    the names of tests. What fails with TRL's own trainers may pass.
    """
    lines = {}
    for name, result in results.items():
        failed = result["outcome"] == "failed"
        reason = known.get(name, known.get(name.partition("[")[0]))
        first_line = result["error"].partition("\n")[0]
        if failed and reason is None:
            lines[name] = first_line
        elif failed and not re.search(reason.error, result["error"]):
            lines[name] = f"fails with another error than is listed ({reason.text}): {first_line}"
        elif result["outcome"] == "passed" and name in known.keys() - TRL_FAILS.keys():
            lines[name] = f"passes, though it is listed: {reason.text}"
    return lines


def summary(results: dict[str, dict]) -> list[str]:
    """
    Returns a line for each file with counts of outcomes, and one about all tests that make an instance of a class of
    this package. Distillation is left out of the last: TRL's tests of it are of another release's names.
    """
    lines = []
    for file in dict.fromkeys(name.partition("::")[0] for name in results):
        outcomes = [result["outcome"] for name, result in results.items() if name.startswith(f"{file}::")]
        counts = {outcome: outcomes.count(outcome) for outcome in sorted({*outcomes})}
        lines.append(f"{file} {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
    swapped = [
        result["outcome"] for name, result in results.items() if result["is_swapped"] and "distillation" not in name
    ]
    if swapped:
        lines.append(f"{swapped.count('passed')} passed of {len(swapped)} that touch a swapped class")
    return lines
