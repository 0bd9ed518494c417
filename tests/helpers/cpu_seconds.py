# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pytest plugin that prints the CPU seconds of each file at the end, including the processes that its tests start.

Files run in the order of `cpu_seconds.json`, the longest first, so that no worker ends long after the others. It holds
the times of the default run and of the slow tests. `--write-cpu-seconds` stores those of a run.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest


STORED = Path(__file__).parents[1] / "cpu_seconds.json"
SHOWN = 20  # files

_seconds: Counter[str] = Counter()


def _so_far() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser):
    parser.addoption("--write-cpu-seconds", action="store_true", help="store the CPU seconds of each file that ran")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    seconds = json.loads(STORED.read_text())[_run(config)]
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0))  # stable, so that tests of a file stay together


def _run(config) -> str:
    return "slow" if config.getoption("markexpr") == "slow" else "default"


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = _so_far()
    try:
        return (yield)
    finally:
        _seconds[_file(item.nodeid)] += _so_far() - before


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = dict(_seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter, config):
    longest = ", ".join(f"{file} {seconds:.0f}" for file, seconds in _seconds.most_common(SHOWN))
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} CPU seconds in tests, of these {longest}")
    if config.getoption("write_cpu_seconds"):
        stored, run = json.loads(STORED.read_text()), _run(config)
        stored[run] |= {file: round(n, 1) for file, n in _seconds.items()}
        stored[run] = dict(sorted(stored[run].items(), key=lambda each: -each[1]))
        STORED.write_text(json.dumps(stored, indent=0) + "\n")
