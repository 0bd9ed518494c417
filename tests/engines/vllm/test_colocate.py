# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Compares the samples of the colocated engine with the model's forward pass."""

import pytest
import torch
from helpers.engine_runs import Recorded, make
from helpers.marks import slow_but
from helpers.samplers import Remembers
from helpers.trainer_utils import audio_rows, image_rows, video_rows

from trl_multimodal_rft import MultimodalDistillationTrainer


@pytest.mark.parametrize(
    ("family", "rows"),
    slow_but(
        [("qwen2_audio", audio_rows), ("qwen2_5_vl", video_rows), ("qwen2_5_vl", image_rows)],
        ("qwen2_5_vl", image_rows),
    ),
)
def test_what_is_sampled_is_what_is_scored(family, rows, tmp_path):
    trainer = make(Recorded, family, rows(), tmp_path)
    rendering = trainer.vllm_generation.llm.renderer.get_mm_processor()
    calls = []
    apply = rendering._apply_hf_processor_main
    rendering._apply_hf_processor_main = lambda *args, **kwargs: calls.append(1) or apply(*args, **kwargs)
    trainer.train()
    assert max(trainer.differences) < 1e-4 and len(trainer.differences) == 3  # after two updates of all weights
    assert len(calls) == 3 * 2  # once per prompt, not per completion


def test_views_are_sampled_and_not_corrected(tmp_path):
    """The self-check compares the engine on the other completions."""
    views = {"rollout_view": "mask_patches(patch_size=28)", "contrast_view": "blank(fraction=0.25)"}
    trainer = make(Recorded, "qwen2_5_vl", image_rows(), tmp_path, **views)
    trainer.train()
    assert max(trainer.differences) < 1e-4 and [len(draw) for draw in trainer.draws] == 3 * [8 + 2]
    assert max(trainer.checks.self_check.engine) < 1e-5 and max(trainer.checks.self_check.engine_updated) < 1e-5
    for batch in trainer._buffered_inputs:
        given = batch.sampling_per_token_logps
        ratios = batch.importance_sampling_ratio
        seen = given.isnan().any(1)
        assert seen.sum() == 4 and (ratios[seen] == 1).all() and (ratios[~seen] - 1).abs().max() < 0.1
        assert (ratios[~seen] != 1).any()


def test_student_samples_under_a_view(tmp_path):
    """And learns from itself without the view what it sampled from the engine."""
    options = {"student_view": "blank", "max_steps": 1, "learning_rate": 0.0}
    objects = {"reward_funcs": None}
    trainer = make(MultimodalDistillationTrainer, "qwen2_5_vl", image_rows(), tmp_path, objects, **options)
    trainer.sampler = Remembers(trainer)
    trainer.own_positions = True
    trainer.train()
    ((prompts, completions, logps),) = trainer.sampler.calls
    assert all(prompt.media["pixel_values"].std() < 1 for prompt in prompts)  # three grey channels
    for prompt, ids, sampled in zip(prompts, completions, logps, strict=True):
        assert (Recorded._own_logps(trainer, prompt, torch.tensor(ids)) - torch.tensor(sampled)).abs().max() < 1e-4
    assert trainer.state.log_history[0]["loss"] > 1e-3
