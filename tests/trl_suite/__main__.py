# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs TRL's own tests of its trainers with this package's trainers in their place.

    python tests/trl_suite CHECKOUT            # a checkout of TRL near the installed version
    python tests/trl_suite CHECKOUT dpo kto    # these trainers only
    python tests/trl_suite CHECKOUT --trl      # TRL's own trainers, with the same stand-ins

Prints what fails and isn't listed in `known.py`, or is listed and passes, and fails if there is any.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from trl_suite.known import KNOWN, TRL_FAILS, WITH_SELF_CHECK  # noqa: E402


FILES = {
    "dpo": ["test_dpo_trainer.py"],
    "kto": ["test_kto_trainer.py"],
    "reward": ["test_reward_trainer.py"],
    "sft": ["test_sft_trainer.py"],
    "grpo": ["test_grpo_trainer.py"],
    "rloo": ["test_rloo_trainer.py"],
    "distillation": ["test_distillation_trainer.py", "experimental/test_distillation_trainer.py"],
}


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
    cache, copy = work / "hub", work / "suite"
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
        output, log = work / "results.json", work / f"{Path(file).stem}.log"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", f"tests/{file}", "-p", "trl_suite.plugin", "-m", "not slow"]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-k", select] if select else []
        with log.open("w") as lines:
            options = {"cwd": copy, "env": {**environment, "TRL_SUITE_RESULTS": str(output)}}
            subprocess.run(command, stdout=lines, stderr=subprocess.STDOUT, **options)
        if not output.exists():
            raise RuntimeError(f"{file} has no results; see {log}.")
        results |= json.loads(output.read_text())
    return results


_MAKE = "import pathlib, sys, trl_suite.stand_ins as s; s.make_stand_ins(*map(pathlib.Path, sys.argv[1:]))"


def unexpected(results: dict[str, dict], known: dict[str, str]) -> dict[str, str]:
    """Returns what fails and isn't known, and what is known and passes, by the names of tests."""
    lines = {}
    for name, result in results.items():
        failed, reason = result["outcome"] == "failed", known.get(name, known.get(name.partition("[")[0]))
        if failed and reason is None:
            lines[name] = result["error"].partition("\n")[0]
        elif not failed and reason is not None and name in known and result["outcome"] == "passed":
            lines[name] = f"passes, though it is listed: {reason}"
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL near the installed version")
    parser.add_argument("trainers", nargs="*", metavar="trainer", help=f"some of {', '.join(FILES)}; by default all")
    parser.add_argument("--trl", action="store_true", help="run TRL's own trainers")
    parser.add_argument("--no-self-check", action="store_true", help="use `self_check=False`")
    parser.add_argument("-k", default="", help="only tests whose names match, as for pytest")
    parser.add_argument("--work", type=Path, help="folder for stand-ins and logs, which another run uses again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = (arguments.work or Path(folder)).resolve()
        results = run(
            arguments.checkout.resolve(),
            work,
            arguments.trainers or [*FILES],
            with_trl=arguments.trl,
            self_check=not arguments.no_self_check,
            select=arguments.k,
        )
    known = TRL_FAILS if arguments.trl else {**TRL_FAILS, **KNOWN}
    if not arguments.trl and not arguments.no_self_check:
        known |= WITH_SELF_CHECK
    for file in dict.fromkeys(name.partition("::")[0] for name in results):
        outcomes = [result["outcome"] for name, result in results.items() if name.startswith(f"{file}::")]
        counts = {outcome: outcomes.count(outcome) for outcome in sorted({*outcomes})}
        print(file, ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    lines = unexpected(results, known)
    for name, line in lines.items():
        print(f"  {name}: {line}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
