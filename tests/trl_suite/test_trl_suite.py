# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""TRL's own tests pass with this package's trainers in place of TRL's, where a checkout of TRL is given."""

import os
from pathlib import Path

import pytest

from trl_suite.known import KNOWN, TRL_FAILS, WITH_SELF_CHECK
from trl_suite.suite import FILES, known_failures, run, unexpected


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


def test_results_are_compared_with_the_list():
    failed, passed = {"outcome": "failed", "error": "ValueError: no\nmore"}, {"outcome": "passed", "error": ""}
    results = {"a.py::test[1]": failed, "a.py::test[2]": passed, "b.py::test": failed, "c.py::test": passed}
    known = {"a.py::test": "private", "c.py::test": "TRL fails, too"}
    assert unexpected(results, known) == {
        "b.py::test": "ValueError: no",
        "c.py::test": "passes, though it is listed: TRL fails, too",
    }


def test_the_list_names_files_of_the_suite_and_reasons():
    lists = (TRL_FAILS, KNOWN, WITH_SELF_CHECK)
    files = {file for names in FILES.values() for file in names}
    assert {name.partition("::")[0] for names in lists for name in names} <= files
    assert all(reason for names in lists for reason in names.values())
    assert sum(map(len, lists)) == len({name for names in lists for name in names})
