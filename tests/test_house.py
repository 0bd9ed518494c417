# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The package doesn't exceed the bounds of `house.json`: ties to TRL's internals, length, entanglement."""

import json

import house


def test_nothing_got_worse():
    worse = house.worse(house.measure(), json.loads(house.BOUNDS.read_text()))
    assert not worse, "\n".join(worse)


def test_what_got_worse_is_named():
    found = {"overrides": ["A.x", "A.y"], "lines": 5, "too long": {"files": {"a.py": 800}}}
    bounds = house.bounds_of(found)
    assert house.worse(found, bounds) == []
    assert house.moved({"lines": 4, "files": {"a": 9}}, {"lines": 5, "files": {"a": 8}}, min) == {
        "lines": 4,
        "files": {"a": 8},
    }
    more = {"overrides": ["A.x", "A.y", "B.x"], "lines": 6, "too long": {"files": {"a.py": 800, "b.py": 701}}}
    assert house.worse(more, bounds) == [
        "overrides: 3, at most 2: A.x, A.y, B.x",
        "lines: 6, at most 5",
        "too long: files: b.py: 701, at most 0",
    ]
