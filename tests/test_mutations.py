# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each defect of `mutations.json` can be planted: its line is there once, and differs from what replaces it."""

import ast
import functools

import house
import mutations
import pytest


def test_every_defect_can_be_planted():
    sound = functools.cache(lambda file: ast.dump(ast.parse((house.PACKAGE / file).read_text())))
    for entry in mutations.entries():
        assert ast.dump(ast.parse(mutations.mutated(entry, house.PACKAGE))) != sound(entry["file"]), entry


def test_a_missing_or_ambiguous_anchor_is_named(tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    y = 1\n    return x\n\n\ndef g(x):\n    y = 2\n    return x\n")
    entry = {"file": "a.py", "line": "return x", "to": "return -x"}
    second = mutations.mutated({**entry, "after": "def g(x):"}, tmp_path)
    assert second.endswith("    y = 2\n    return -x\n") and "    return x\n" in second
    for changed in ({}, {"line": "return z"}, {"line": "y = 1", "after": "def g(x):"}):
        with pytest.raises(LookupError, match="a.py has .*, or none .* from there on"):
            mutations.mutated({**entry, **changed}, tmp_path)
