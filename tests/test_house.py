# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The package doesn't exceed the bounds of `house.json`: ties to TRL's internals, length, entanglement."""

import json

import house


def test_nothing_got_worse():
    worse = house.worse(house.measure(), json.loads(house.BOUNDS.read_text()))
    assert not worse, "\n".join(worse)
