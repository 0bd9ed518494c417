# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""TRL's own tests pass with this package's trainers in place of TRL's, where a checkout of TRL is given."""

import os
from pathlib import Path

import pytest

from trl_suite.known import KNOWN, TRL_FAILS, WITH_SELF_CHECK, Reason
from trl_suite.suite import FILES, known_failures, run, summary, unexpected


CHECKOUT = os.environ.get("TRL_CHECKOUT")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("trl_suite")


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="the variable TRL_CHECKOUT names no checkout of TRL")
@pytest.mark.parametrize("trainer", FILES)
def test_what_passes_with_trl_passes_here(trainer, work):
    results = run(Path(str(CHECKOUT)).resolve(), work, [trainer])
    assert results and unexpected(results, known_failures()) == {}


def result(outcome: str, error: str = "", is_swapped: bool = True) -> dict:
    return {"outcome": outcome, "error": error, "is_swapped": is_swapped}


def test_results_are_compared_with_the_list():
    failed = result("failed", "ValueError: no\nmore")
    results = {
        "a.py::test[1]": failed,
        "a.py::test[2]": result("passed"),
        "b.py::test": failed,
        "c.py::test": result("passed"),
        "d.py::test": result("failed", "KeyError: other"),
    }
    names = ("a.py::test", "c.py::test", "d.py::test")
    known = {name: Reason("private", r"ValueError: no\nmo") for name in names}
    assert unexpected(results, known) == {
        "b.py::test": "ValueError: no",
        "c.py::test": "passes, though it is listed: private",
        "d.py::test": "fails with another error than is listed (private): KeyError: other",
    }


def test_the_claim_is_about_tests_that_touch_a_swapped_class():
    results = {
        "a.py::one": result("passed"),
        "a.py::two": result("failed"),
        "a.py::three": result("passed", is_swapped=False),
        "experimental/test_distillation_trainer.py::one": result("passed"),
    }
    assert summary(results) == [
        "a.py 1 failed, 2 passed",
        "experimental/test_distillation_trainer.py 1 passed",
        "1 passed of 2 that touch a swapped class",
    ]


@pytest.mark.parametrize("text", ["import no_such_module", "def test_a():\n    raise KeyboardInterrupt"])
def test_a_file_that_does_not_run_is_no_success(text, tmp_path):
    """Whether it can't be collected, or ends before its last test."""
    checkout = tmp_path / "trl"
    work = tmp_path / "work"
    for folder in (checkout / "tests", work / "hub"):
        folder.mkdir(parents=True)
    (work / "hub" / "complete").touch()  # no stand-ins needed
    (checkout / "tests" / "testing_utils.py").touch()
    (checkout / "tests" / "test_dpo_trainer.py").write_text(f"{text}\n\n\ndef test_b():\n    pass\n")
    with pytest.raises(RuntimeError, match="pytest ended with status 2, before all tests had run"):
        run(checkout, work, ["dpo"])


def test_the_list_names_files_of_the_suite_and_reasons():
    lists = (TRL_FAILS, KNOWN, WITH_SELF_CHECK)
    files = {file for names in FILES.values() for file in names}
    assert {name.partition("::")[0] for names in lists for name in names} <= files
    assert all(reason for names in lists for reason in names.values())
    assert sum(map(len, lists)) == len({name for names in lists for name in names})
