# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The package doesn't exceed the bounds of `house.json`: ties to TRL's internals, layers, types."""

import json

import house


def test_nothing_got_worse():
    worse = house.worse(house.ties(), json.loads(house.BOUNDS.read_text()))
    remedy = "Do without, or raise the number in tests/house.json, and say why in the commit"
    assert not worse, "\n".join([*worse, remedy])


def test_bounds_only_fall():
    """What has grown keeps its bound, what has no bound gets one, and what is no longer measured loses its own."""
    found = {"names": ["a", "b"], "number": 3, "of": {"GRPO": ["a"], "new": 2}}
    bounds = {"names": 3, "number": 2, "of": {"GRPO": 1}, "gone": 1}
    assert house.lowered(found, bounds) == {"names": 2, "number": 2, "of": {"GRPO": 1, "new": 2}}
    assert house.worse(found, bounds) == ["number: 3, at most 2"]
