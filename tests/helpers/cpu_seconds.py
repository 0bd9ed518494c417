# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pytest plugin that prints the CPU seconds of each file at the end, including the processes that its tests start.

Files run in the order of `cpu_seconds.json`, the longest first, so that no worker ends long after the others. It holds
the times of each suite; `--write-cpu-seconds` stores those of a run. A whole suite fails if a file has no time there.

```bash
python tests/helpers/cpu_seconds.py  # the files that take longest
```
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest


STORED = Path(__file__).parents[1] / "cpu_seconds.json"
SHOWN = 10  # files

forked = 0.0  # CPU seconds of commands that were forked elsewhere (`forked.py`)
_seconds: Counter[str] = Counter()
_slow: set[str] = set()  # files with slow tests; the default suite checks that these have their times, too
_MISSING = pytest.StashKey[str]()


def _so_far() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forked


def pytest_addoption(parser):
    parser.addoption("--write-cpu-seconds", action="store_true", help="store the CPU seconds of each file that ran")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    _slow.update(_file(item.nodeid) for item in items if item.get_closest_marker("slow"))
    seconds = json.loads(STORED.read_text()).get(_run(config), {})
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0))  # stable, so that tests of a file stay together


def _run(config) -> str:
    """Returns the suite, whose other name is a target of the Makefile."""
    expression = config.getoption("markexpr")
    return "slow" if expression == "slow" else "lightrft" if expression.startswith("lightrft") else "default"


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
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    _seconds.update(output.get("cpu_seconds", {}))
    _slow.update(output.get("slow", ()))


def store(suite: str, seconds: dict[str, float]) -> None:
    stored = json.loads(STORED.read_text())
    stored[suite] = stored.get(suite, {}) | {file: round(n, 1) for file, n in seconds.items()}
    present = {file: n for file, n in stored[suite].items() if (STORED.parent / file).exists()}
    stored[suite] = dict(sorted(present.items(), key=lambda entry: -entry[1]))
    STORED.write_text(json.dumps(stored, indent=0) + "\n")


def without_time(suite: str, files: Iterable[str]) -> str:
    """Returns an error that names the files of a suite that `cpu_seconds.json` lacks, or nothing."""
    missing = sorted(set(files) - json.loads(STORED.read_text()).get(suite, {}).keys())
    names = ", ".join(missing)
    return f"{suite} tests not in {STORED.name}, see `--write-cpu-seconds`: {names}" if missing else ""


@pytest.hookimpl(tryfirst=True)  # before the terminal's summary
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput |= {"cpu_seconds": dict(_seconds), "slow": list(_slow)}
        return
    whole = config.args_source == config.ArgsSource.TESTPATHS and not config.getoption("keyword")
    missing = [without_time(_run(config), _seconds), without_time("slow", _slow)] if whole else []
    config.stash[_MISSING] = "\n".join(filter(None, missing))
    if config.stash[_MISSING] and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.getoption("write_cpu_seconds"):
        store(_run(config), _seconds)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} CPU seconds in tests, of these {_longest(_seconds)}")
    if config.stash.get(_MISSING, ""):
        terminalreporter.write_line(config.stash[_MISSING], red=True)


def _longest(seconds: dict[str, float]) -> str:
    return ", ".join(f"{file} {n:.0f}" for file, n in Counter(seconds).most_common(SHOWN))


if __name__ == "__main__":
    suites = json.loads(STORED.read_text())
    print(_longest({f"{file} ({suite})": n for suite, seconds in suites.items() for file, n in seconds.items()}))
