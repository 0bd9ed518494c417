# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pytest plugin that prints the CPU seconds of each file of tests at the end. They include processes that tests start.

Files run by their times in `cpu_seconds.json`, the longest first, so that no worker ends long after the others. The
JSON file has the times of each suite. `--write-cpu-seconds` stores the times of a run. A file without a time counts as
the mean of its suite. `--write-results` writes the results of a run, which `weekly.py` reads.

```bash
python tests/helpers/cpu_seconds.py  # prints the files that take longest
```
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest


STORED = Path(__file__).parents[1] / "cpu_seconds.json"
SHOWN = 10  # number of files that are printed

forked = 0.0  # CPU seconds of commands that were forked elsewhere (`forked.py`)
_seconds: Counter[str] = Counter()


def _so_far() -> float:
    """Returns the CPU seconds of this process, of its children that have ended, and of forked commands."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forked


def pytest_addoption(parser):
    parser.addoption("--write-cpu-seconds", action="store_true", help="store the CPU seconds of each file that ran")
    parser.addoption("--write-results", help="file for the results, see `weekly.py`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    seconds = json.loads(STORED.read_text()).get(_run(config), {})
    files = {_file(item.nodeid) for item in items}
    times = {file: seconds.get(file, sum(seconds.values()) / max(len(seconds), 1)) for file in files}
    items.sort(key=lambda item: -times[_file(item.nodeid)])  # stable, so that tests of a file stay together


def _run(config) -> str:
    """Returns the suite of a run: the marker at the start of pytest's option `-m`, or the default."""
    first = config.getoption("markexpr").split(" ")[0]
    return first if first in ("slow", "gate") else "default"


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = _so_far()
    try:
        return (yield)
    finally:
        _seconds[_file(item.nodeid)] += _so_far() - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):  # a worker of pytest-xdist has ended
    _seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def text(suites: dict[str, dict[str, float]]) -> str:
    """Returns the content of `cpu_seconds.json`: times of existing files, sorted, so that branches merge."""
    present = {
        suite: {file: round(seconds[file], 1) for file in sorted(seconds) if (STORED.parent / file).exists()}
        for suite, seconds in suites.items()
    }
    return json.dumps(present, indent=0) + "\n"


def store(suite: str, seconds: dict[str, float]) -> None:
    suites = json.loads(STORED.read_text())
    STORED.write_text(text({**suites, suite: suites.get(suite, {}) | seconds}))


@pytest.hookimpl(tryfirst=True)  # runs before the terminal's summary
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):  # only in a worker
        config.workeroutput["cpu_seconds"] = dict(_seconds)
    elif config.getoption("write_cpu_seconds"):
        store(_run(config), _seconds)


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("write_results"):
        Path(path).write_text(json.dumps(_results(terminalreporter.stats)))
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} CPU seconds in tests, of these {_longest(_seconds)}")


def _results(reports: dict[str, list]) -> dict[str, object]:
    """Returns numbers of tests, the names of failed tests, and the CPU seconds of each file."""
    failed = sorted({report.nodeid for outcome in ("failed", "error") for report in reports.get(outcome, ())})
    counts = {outcome: len(reports.get(outcome, ())) for outcome in ("passed", "skipped")}
    return {**counts, "failed": failed, "seconds": dict(_seconds)}


def _longest(seconds: dict[str, float]) -> str:
    return ", ".join(f"{file} {n:.0f}" for file, n in Counter(seconds).most_common(SHOWN))


if __name__ == "__main__":
    suites = json.loads(STORED.read_text())
    print(_longest({f"{file} ({suite})": n for suite, seconds in suites.items() for file, n in seconds.items()}))
