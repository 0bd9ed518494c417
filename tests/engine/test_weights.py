# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Weights that the colocated engine is given: it samples from what the trainer holds, whatever changed."""

import pytest
import torch
from helpers.trainer_utils import audio_rows, image_rows
from peft import LoraConfig
from test_colocate import Recorded, make

from trl_multimodal_rft import MultimodalGRPOConfig


DECODER = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
QWEN_TOWER = r".*visual.*\.(qkv|proj|gate_proj|up_proj|down_proj|mlp\.0|mlp\.2)"


def trainer_of(family, rows, tmp_path, peft_config=None, **options):
    options = {"max_completion_length": 8, "self_check": False, **options}
    return make(Recorded, MultimodalGRPOConfig, family, rows(4), tmp_path, peft_config=peft_config, **options)


def difference(trainer) -> float:
    """Of the engine's log-probabilities to the model's, after a sync."""
    trainer._last_loaded_step = -1
    trainer._generate_and_score_completions([row for row in list(trainer.train_dataset)[:2] for _ in range(4)])
    return trainer.differences[-1]


def change(trainer, part="") -> None:
    """Moves all trained weights whose names have a part."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and part in name:
                parameter.add_(0.1 * parameter.std().clamp(min=0.05) * torch.randn_like(parameter))


def test_all_weights_and_a_tower_alone(tmp_path, monkeypatch):
    trainer = trainer_of("qwen2_5_vl", image_rows, tmp_path)
    assert difference(trainer) < 1e-5
    change(trainer)
    assert difference(trainer) < 1e-5
    change(trainer, "visual")
    assert difference(trainer) < 1e-5
    change(trainer, "visual")
    monkeypatch.setattr(trainer.vllm_generation.llm.llm_engine, "reset_encoder_cache", lambda: None)
    assert difference(trainer) > 1e-3  # what the tower made of the same images before


@pytest.mark.parametrize(
    ("family", "rows", "towers"), [("qwen2_audio", audio_rows, r"|.*audio_tower.*\.(q_proj|fc1)"), ("qwen2_5_vl", image_rows, f"|{QWEN_TOWER}")]
)
def test_merged_adapter(family, rows, towers, tmp_path):
    trainer = trainer_of(family, rows, tmp_path, LoraConfig(r=4, target_modules=DECODER + towers))
    assert difference(trainer) < 1e-5
    for _ in range(2):
        change(trainer)
        assert difference(trainer) < 1e-5


@pytest.mark.parametrize(
    ("family", "rows", "towers"), [("qwen2_audio", audio_rows, ""), ("qwen2_5_vl", image_rows, f"|{QWEN_TOWER}")]
)
def test_adapter_alone(family, rows, towers, tmp_path, monkeypatch):
    settings = {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 16}}
    lora = LoraConfig(r=4, target_modules=DECODER + towers, **settings)
    trainer = trainer_of(family, rows, tmp_path, lora, vllm_sync_adapter=True)
    monkeypatch.setattr(trainer.vllm_generation, "_load_weights", lambda: pytest.fail("all weights"))
    assert difference(trainer) < 1e-5
    for _ in range(2):
        change(trainer)
        assert difference(trainer) < 1e-5
    assert trainer.vllm_generation.llm.llm_engine.list_loras() == {3}
