# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of asynchronous rollouts runs, and its bound is what arithmetic says."""

import json

import async_rollouts
import pytest
from helpers.fake_server import latency


pytestmark = pytest.mark.slow


def test_bound():
    times = [latency(i) for i in range(24)]
    longest = [max(times[i : i + 8]) for i in range(0, 24, 8)]
    assert async_rollouts.bound(0, 3, 8, slots=8, update=2.0) == pytest.approx(2 + sum(longest) / 3)
    # All start at once; updates are short, or long
    assert async_rollouts.bound(2, 3, 8, slots=24, update=0.0) == pytest.approx(max(longest) / 3)
    assert async_rollouts.bound(2, 3, 8, slots=24, update=9.0) == pytest.approx(9 + longest[0] / 3)
    # One after the other, without a pause
    assert async_rollouts.bound(2, 3, 8, slots=1, update=0.0) == pytest.approx(sum(times) / 3)


def test_step_times(capsys):
    options = ["--unit", "0.01", "--steps", "3", "--prompts", "2", "--group", "4", "--staleness", "0", "2", "--json"]
    async_rollouts.main(options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["staleness"]
    assert [*found] == ["0", "2"]
    assert all(0 < each["bound_s"] < each["step_s"] and 0 < each["ratio"] < 1 for each in found.values())
