# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Thousands of damaged files: each gives a medium or a named error within limits, and opens nothing else."""

import re
import sys

import pytest
from helpers import forked
from helpers.folders import TESTS
from helpers.processes import PATIENCE, python_command, python_environment


@pytest.mark.skipif(sys.platform != "linux", reason="what native code opens is seen by inotify")
def test_damaged_media_end_in_a_medium_or_a_named_error(tmp_path):
    # Runs in a separate process, because an audit hook is permanent and a decoder may crash
    script = TESTS / "helpers" / "media_fuzz.py"
    command = python_command([script, tmp_path, "0", "6"])
    options = {"capture_output": True}
    run = forked.run(command, env=python_environment(), timeout=PATIENCE, **options)
    last = tmp_path / "last.txt"
    assert run.returncode == 0, f"{last.exists() and last.read_text()}: {run.stderr[-3000:]}"
    assert not run.stdout, run.stdout[:3000]
    inputs, loaded, named = map(int, re.search(r"(\d+) inputs, (\d+) loaded, (\d+) named", run.stderr).groups())
    assert min(loaded, named) > 0 and loaded + named == inputs
