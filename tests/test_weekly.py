# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Results of suites, and the file that has them for `.ci/run`."""

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import weekly
from helpers import forked


SUITE = """
import pytest

def test_right(): pass
def test_wrong(): assert False
def test_left_out(): pytest.skip()

@pytest.fixture
def broken(): raise ValueError
def test_without_its_fixture(broken): pass
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the file that `--write-results` wrote of a suite, in a process of its own."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    options = ["-p", "helpers.cpu_seconds", "-p", "no:cacheprovider", "-n", "1", "--write-results", "results.json"]
    run = forked.run([sys.executable, "-m", "pytest", *options, "."], cwd=folder, capture_output=True)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    return folder / "results.json"


def test_results_of_a_suite(results):
    found = json.loads(results.read_text())
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert found["failed"] == [f"test_suite.py::test_{name}" for name in ("without_its_fixture", "wrong")]
    assert found["seconds"].keys() == {"test_suite.py"}


def test_weekly_run(results, tmp_path, monkeypatch, capsys):
    """A suite that ended without results has failed; what is read from the file fails nothing."""
    monkeypatch.setattr(weekly, "WRITTEN", tmp_path / "weekly.json")
    assert weekly.main([]) == 0 and capsys.readouterr().out == "No weekly.json: `make test-weekly`\n"
    assert weekly.main([str(results), str(tmp_path / "vllm.json")]) == 1
    written = capsys.readouterr().out
    assert weekly.main([]) == 0 and capsys.readouterr().out == written
    first, *failed = written.splitlines()
    assert "make test-weekly, 0 commits and 0 days ago: 1 passed, 3 failed, 1 skipped" in first
    assert failed == ["test_suite.py::test_without_its_fixture", "test_suite.py::test_wrong", "vllm: no results"]
    found = json.loads(weekly.WRITTEN.read_text())
    weekly.WRITTEN.write_text(json.dumps({**found, "commit": "0" * 40, "failed": []}))
    assert weekly.main([]) == 0 and "unknown commits and 0 days ago: 1 passed, 0 failed" in capsys.readouterr().out
    results.with_name("right.json").write_text(json.dumps({**found, "failed": []}))
    assert weekly.main([str(results.with_name("right.json"))]) == 0


def test_options_of_pytest_reach_the_suite_of_engines(monkeypatch, capsys):
    """`TEST_OPTIONS` go to both suites of `make test-weekly`."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("suite", Path(__file__).with_name("engine") / "__main__.py")
    suite, commands = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(suite)

    def started(command, **streams):
        commands.append(command)
        done = {"communicate": lambda: ("slowest durations\n1 passed", None), "returncode": 0, "seconds": 1.0}
        return nullcontext(SimpleNamespace(**done))

    monkeypatch.setattr(forked, "Popen", started)
    monkeypatch.setattr(forked, "serving", lambda imported: nullcontext())
    monkeypatch.setattr(sys, "argv", ["engine", "test_tools.py", "--durations=20", "-k", "calls", "-m", "slow or gpu"])
    assert suite.main() == "" and "slowest durations" in capsys.readouterr().out
    ((*_, file, m, expression, durations, k, name, _, _),) = commands
    assert (file, m, expression) == ("tests/engine/test_tools.py", "-m", "slow or gpu")
    assert (durations, k, name) == ("--durations=20", "-k", "calls")
