# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The demo of a pretrained model that learns to hear, for a step of each of its parts."""

from helpers.real_models import REAL
from scripts.test_examples import launch


pytestmark = REAL


SMALL = ("--dry_run", "--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length", "4")


def test_a_step_of_each_part(tmp_path):
    output = launch("grpo_speech", tmp_path, *SMALL, cold_start=1, batch_size=2)
    assert "trained in" in output and "effect of another audio" in output and "Dry run: 1 step of 2" in output
