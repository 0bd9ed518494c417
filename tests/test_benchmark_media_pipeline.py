# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of waiting for media runs."""

import json

import media_pipeline
import pytest
import torch


@pytest.mark.slow
def test_media_pipeline(capsys):
    clip = ["--clips", "1", "--seconds", "0.5", "--size", "160", "120", "--prompts", "1"]
    threads = ["--threads", str(torch.get_num_threads())]
    media_pipeline.main([*clip, *threads, "--steps", "1", "--repeats", "1", "--json"])
    *printed, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["step_s"].keys() == {"when needed", "ahead", "known"} and result["ratios"]["known"] == 1
    assert result["reading_s"] > 0 and min(result["step_s"].values()) > result["wait_s"]
    assert any(line.startswith("| ahead | ") for line in printed)
