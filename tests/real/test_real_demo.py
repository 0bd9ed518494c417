# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The demos of pretrained models that learn to hear and to see, for a step of each of their parts."""

import pytest
from helpers.real_models import REAL
from scripts.test_examples import launch


pytestmark = REAL


SMALL = ("--dry_run", "--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length", "4")


@pytest.mark.parametrize(("script", "medium"), [("grpo_speech", "audio"), ("grpo_sight", "image")])
def test_a_step_of_each_part(script, medium, tmp_path):
    output = launch(script, tmp_path, *SMALL, cold_start=1, batch_size=2)
    assert "trained in" in output and f"effect of another {medium}" in output and "Dry run: 1 step of 2" in output
