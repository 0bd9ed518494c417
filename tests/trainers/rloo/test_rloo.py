# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""[`MultimodalRLOOTrainer`] beyond TRL's, see `test_trl_parity.py`: its correction for engines, and its card."""

import pytest
import torch
from helpers.samplers import FromEngine
from helpers.trainer_utils import image_rows, make_trainer
from huggingface_hub import ModelCard

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer


FAMILY = "qwen2_5_vl"


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_corrects_for_vllm_as_trls_grpo(mode, tmp_path):
    bounds = {"clip_max": 1.0, "clip_min": 0.001}
    named = {f"vllm_importance_sampling_{name}": value for name, value in {"mode": mode, **bounds}.items()}
    options = {**named, "self_check": False, "max_steps": 1, "beta": 0.0, "learning_rate": 0.0}
    runs, grpo, rloo = [], MultimodalGRPOTrainer, MultimodalRLOOTrainer
    for trainer_class, corrects in ((grpo, True), (rloo, True), (rloo, False)):
        options["vllm_importance_sampling_correction"] = corrects
        trainer = make_trainer(trainer_class, FAMILY, image_rows(), tmp_path, sampler=FromEngine, **options)
        trainer.use_vllm = True
        trainer.train()
        [inputs] = trainer._buffered_inputs
        metrics = {key: value for key, value in trainer.state.log_history[0].items() if "sampl" in key}
        runs.append((inputs, metrics))
    (grpo, expected), (rloo, metrics), (uncorrected, without) = runs
    assert len(expected) == 6 and expected == pytest.approx(metrics, rel=1e-5)
    assert [*without] == ["sampling/no_logp_frac"]
    ratios = grpo.importance_sampling_ratio[:, 0]
    torch.testing.assert_close(rloo.advantages, ratios * uncorrected.advantages)
    assert uncorrected.advantages.abs().min() > 0
    inside = (ratios > 0.001) & (ratios < 1)
    assert inside.any() and not inside.all()


def test_model_card_names_the_method(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "self_check": True}
    trainer = make_trainer(MultimodalRLOOTrainer, FAMILY, image_rows(), tmp_path, **options)
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert {"rloo", "trl", "trl-multimodal-rft"} <= set(card.data.tags)
    assert "grpo" not in card.data.tags
    assert "Method: RLOO" in card.text
    assert str(trainer.checks.self_check) in card.text
