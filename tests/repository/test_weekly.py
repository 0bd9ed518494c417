# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Results of the suites of `make test-weekly`."""

import importlib.util
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import weekly
from helpers import forked
from helpers.folders import TESTS


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
    """Returns the file of results of a suite, in a process of its own."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    options = ["-p", "no:cacheprovider", "-n", "1", "--junit-xml", "results.xml"]
    run = forked.run([sys.executable, "-m", "pytest", *options, "."], cwd=folder, capture_output=True)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    return folder / "results.xml"


def test_results_of_suites(results, tmp_path, monkeypatch, capsys):
    """A suite that ended without results has failed."""
    monkeypatch.setattr(weekly, "SUMMARY", tmp_path / "weekly" / "summary.txt")
    assert weekly.main([str(results), str(tmp_path / "vllm.xml")]) == 1
    first, *failed = capsys.readouterr().out.splitlines()
    assert "make test-weekly: 1 passed, 3 failed, 1 skipped" in first
    assert failed == ["test_suite.test_without_its_fixture", "test_suite.test_wrong", "vllm: no results"]
    assert weekly.SUMMARY.read_text().splitlines() == [first, *failed]


def test_a_run_without_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(weekly, "SUMMARY", tmp_path / "summary.txt")
    right = tmp_path / "right.xml"
    right.write_text('<testsuites><testsuite><testcase name="a" time="2.0"/></testsuite></testsuites>')
    assert weekly.main([str(right)]) == 0 and "1 passed, 0 failed, 0 skipped, 2 s" in weekly.SUMMARY.read_text()


def test_results_of_several_processes_are_one_file(results, tmp_path, monkeypatch):
    suite = engine_suite(monkeypatch)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("a", "b"):
        (parts / f"{name}.xml").write_bytes(results.read_bytes())
    suite.join_results(parts, tmp_path / "all.xml")
    assert weekly.results_of(tmp_path / "all.xml")[:2] == (2, 2)


def engine_suite(monkeypatch):
    """Returns the module that runs the tests with vLLM's engine."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("suite", TESTS / "engine" / "__main__.py")
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    return suite


def test_options_of_pytest_reach_the_suite_of_engines(monkeypatch, capsys):
    """`TEST_OPTIONS` go to both suites of `make test-weekly`."""
    suite = engine_suite(monkeypatch)
    commands = []

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
