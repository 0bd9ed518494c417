# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainer: TRL's updates on text and images, and those of the equations on audio and video."""

import pytest
from helpers.distillation_runs import InjectedOurs, InjectedTRL, distill
from helpers.trainer_utils import assert_equal, image_rows, text_rows


SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
OPTIONS = {
    "reverse": {},
    "forward": {"beta": 0.0},
    "jsd": {"beta": 0.5},
    "temperature": {"beta": 0.3, "temperature": 0.7},
    "accumulation": {**SPLIT, "beta": 0.5},
    "checkpointing": {**SPLIT, "gradient_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
}
ROWS = {"qwen2_5_vl": image_rows, "llama": text_rows}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [text_rows, image_rows])
def test_packed_equals_trl(rows, name):
    """Losses, updates and metrics."""
    runs = []
    for trainer_class in (InjectedTRL, InjectedOurs):
        options = dict(OPTIONS[name])
        if name == "evaluated":
            options["objects"] = {"eval_dataset": rows(6)}
        if trainer_class is InjectedOurs:
            options["keep_groups_together"] = False
        runs.append(distill(trainer_class, "qwen2_5_vl", rows(), **options))
    assert all(runs[1].trainer.scored_packed)
    assert_equal(*runs)
