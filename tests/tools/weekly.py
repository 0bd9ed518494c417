# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Prints what the suites of `make test-weekly` found, and writes it to `outputs/weekly/summary.txt`.

`python tests/tools/weekly.py outputs/weekly/{slow,vllm}.xml` reads results of pytest's `--junit-xml`, and exits with 1
after failures.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


SUMMARY = Path(__file__).parents[2] / "outputs" / "weekly" / "summary.txt"


class Results(NamedTuple):
    """Number of tests that passed or were skipped, names of those that failed, and the seconds of all."""

    passed: int
    skipped: int
    failed: list[str]
    seconds: float


def results_of(path: Path) -> Results:
    """Returns the results of a suite, which has failed if it ended without any."""
    if not path.exists():
        return Results(0, 0, [f"{path.stem}: no results"], 0.0)
    passed = 0
    skipped = 0
    failed = []
    seconds = 0.0
    for case in ElementTree.parse(path).iter("testcase"):
        seconds += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Results(passed, skipped, failed, seconds)


def joined(results: Iterable[Results]) -> Results:
    """Returns the results of all suites as one."""
    every = list(results)
    failed = set()
    for each in every:
        failed |= set(each.failed)
    return Results(
        sum(each.passed for each in every),
        sum(each.skipped for each in every),
        sorted(failed),
        sum(each.seconds for each in every),
    )


def described(found: Results) -> str:
    """Returns a line about all suites, and one for each test that failed."""
    counts = f"{found.passed} passed, {len(found.failed)} failed, {found.skipped} skipped, {found.seconds:.0f} s"
    return "\n".join([f"make test-weekly: {counts}", *found.failed])


def main(words: list[str]) -> int:
    found = joined(results_of(Path(word)) for word in words)
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    SUMMARY.write_text(f"{described(found)}\n")
    print(described(found))
    return int(bool(found.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
