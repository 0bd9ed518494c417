# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each defect of `mutations.json` can be planted: its line is there once, and differs from what replaces it."""

import ast
import functools
import subprocess
import sys

import house
import mutations
import pytest


def test_every_defect_can_be_planted():
    sound = functools.cache(lambda file: ast.dump(ast.parse((house.PACKAGE / file).read_text())))
    for entry in mutations.entries():
        assert ast.dump(ast.parse(mutations.mutated(entry, house.PACKAGE))) != sound(entry["file"]), entry


@pytest.mark.slow
def test_tests_of_every_defect_are_collected():
    command = [sys.executable, mutations.__file__, "--collect"]
    run = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_missing_or_ambiguous_anchor_is_named(tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    y = 1\n    return x\n\n\ndef g(x):\n    y = 2\n    return x\n")
    entry = {"file": "a.py", "line": "return x", "to": "return -x"}
    second = mutations.mutated({**entry, "after": "def g(x):"}, tmp_path)
    assert second.endswith("    y = 2\n    return -x\n") and "    return x\n" in second
    for changed in ({}, {"line": "return z"}, {"line": "y = 1", "after": "def g(x):"}):
        with pytest.raises(LookupError, match="a.py has .*, or none .* from there on"):
            mutations.mutated({**entry, **changed}, tmp_path)


def test_tests_run_from_those_that_are_named_to_the_nearest(tmp_path):
    """Of those that import a module directly, the one that has its name comes first, then as they are listed."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_far.py").touch()
    package = "trl_multimodal_rft"
    modules = {f"{package}.a": set(), f"{package}.b": {f"{package}.a"}, f"{package}.c": {f"{package}.b"}}
    of_tests = {
        f"tests/test_{name}.py": {f"{package}.{each}"}
        for name, each in zip(["far", "b", "x", "a"], "cbaa", strict=True)
    }
    nearest = ["tests/test_a.py", "tests/test_x.py", "tests/test_b.py", "tests/test_far.py"]
    runs = functools.partial(mutations.runs, tree=tmp_path, modules=modules, of_tests=of_tests)
    assert runs({"file": "a.py"}) == [nearest]
    assert runs({"file": "a.py", "tests": ["-m", "slow"]}) == [[*nearest, "-m", "slow"]]
    named = ["tests/test_far.py", "-k", "name"]
    assert runs({"file": "a.py", "tests": ["tests/test_gone.py", *named]}) == [named, nearest[:3]]
    with pytest.raises(LookupError, match="No test imports d.py"):
        runs({"file": "d.py"})
