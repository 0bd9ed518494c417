# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The colocated engine samples from the trainer's weights, whatever changed."""

import pytest
import torch
from helpers import families
from helpers.four_bits import NF4, save_wide
from helpers.marks import slow_but
from helpers.omni import OMNI
from helpers.trainer_utils import audio_rows, image_rows, saved
from peft import LoraConfig
from weights import DECODER, QWEN_TOWER, assert_follows, change, difference, trainer_of

from trl_multimodal_rft.engines import vllm_in_process
from trl_multimodal_rft.engines.vllm_adapters import EngineAdapter
from trl_multimodal_rft.engines.vllm_versions import LOADS_BENEATH_ADAPTERS


beneath = pytest.mark.skipif(not LOADS_BENEATH_ADAPTERS, reason="vLLM before 0.28 loads no weights beneath adapters")


@pytest.mark.parametrize(
    ("family", "rows", "towers"),
    [
        pytest.param("qwen2_audio", audio_rows, r".*audio_tower.*\.(q_proj|fc1)", marks=pytest.mark.slow),
        ("qwen2_5_vl", image_rows, QWEN_TOWER),
    ],
)
def test_merged_adapter(family, rows, towers, tmp_path):
    lora = LoraConfig(r=4, target_modules=f"{DECODER}|{towers}")
    assert_follows(trainer_of(saved(family), rows, tmp_path, lora))


def test_all_weights_and_a_tower_alone(tmp_path, monkeypatch):
    trainer = trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path)
    engine = trainer.vllm_generation._runner.model
    loads = []
    load = engine.load_weights
    monkeypatch.setattr(engine, "load_weights", lambda weights: loads.append(1) or load(weights))
    assert_follows(trainer)
    assert len(loads) == 3  # one per sync
    change(trainer, "visual")
    assert difference(trainer) < 1e-5
    change(trainer, "visual")
    monkeypatch.setattr(trainer.vllm_generation.llm.llm_engine, "reset_encoder_cache", lambda: None)
    with pytest.raises(RuntimeError, match="Encoder cache miss"):  # the worker dropped its half with the weights
        difference(trainer)


@pytest.mark.parametrize("has_bias", slow_but([False, True], False))
def test_weights_that_the_engine_has_no_place_for(has_bias, tmp_path):
    model, processor = families.FAMILIES["glm4v"].build()
    model.config.text_config.attention_bias = has_bias
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, image_rows, tmp_path)
    if has_bias:
        assert_follows(trainer)
    else:
        with pytest.raises(RuntimeError, match=r"no place for \d+ weights of the model, such as '.*bias'"):
            difference(trainer)


@pytest.mark.parametrize(
    ("family", "rows", "layers"),
    [
        ("qwen2_5_vl", image_rows, f"{DECODER}|{QWEN_TOWER}"),
        pytest.param("internvl", image_rows, DECODER, marks=pytest.mark.slow),
        pytest.param(OMNI, audio_rows, DECODER, marks=pytest.mark.slow),
    ],
)
def test_adapter_alone(family, rows, layers, omni, tmp_path, monkeypatch):
    settings = {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 16}}
    lora = LoraConfig(r=4, target_modules=layers, **settings)
    folder = omni if family == OMNI else saved(family)
    trainer = trainer_of(folder, rows, tmp_path, lora, engine={"enable_lora": True})
    generation = trainer.vllm_generation
    monkeypatch.setattr(generation, "_load_weights", lambda: pytest.fail("gave all weights"))
    assert_follows(trainer)
    assert generation.llm.llm_engine.list_loras() == {3}
    if family == "internvl":  # vLLM doesn't adapt its tower
        trainer.model.add_adapter("tower", LoraConfig(r=4, target_modules=r".*vision_tower.*q_proj"))
        trainer.model.set_adapter("tower")
        generation._adapter = EngineAdapter(trainer.model, trainer.accelerator)
        with pytest.raises(RuntimeError, match=r"no place for the adapter of 2 layers, such as '.*q_proj'.*False"):
            difference(trainer)


@pytest.mark.slow
def test_adapter_of_a_model_that_vllm_does_not_adapt(tmp_path):
    lora = LoraConfig(r=4, target_modules=DECODER)
    with pytest.raises(ValueError, match="does not support LoRA yet. Set `vllm_engine_kwargs={'enable_lora': False}`"):
        trainer_of(saved("qwen2_audio"), audio_rows, tmp_path, lora, engine={"enable_lora": True})


def test_weights_beside_an_adapter_need_a_vllm_that_takes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_in_process, "LOADS_BENEATH_ADAPTERS", False)
    lora = LoraConfig(r=4, target_modules=DECODER)
    with pytest.raises(ValueError, match="0.28 or later.*or set `vllm_engine_kwargs={'enable_lora': False}`"):
        options = {"engine": {"enable_lora": True}, "vllm_enable_sleep_mode": True}
        trainer_of(saved("qwen2_5_vl"), image_rows, tmp_path, lora, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rows", "alone"),
    [pytest.param("qwen2_5_vl", image_rows, None, marks=beneath), ("qwen2_audio", audio_rows, False)],
)
def test_weights_of_4_bits(family, rows, alone, tmp_path):
    """They stay unchanged. The engine gets their dequantized values."""
    save_wide(family, tmp_path)
    lora = LoraConfig(r=4, target_modules=DECODER)
    trainer = trainer_of(tmp_path, rows, tmp_path, lora, NF4, engine={} if alone is None else {"enable_lora": alone})
    for parameter in trainer.model.parameters():  # TRL trains it in bfloat16, which rounds in the trainer alone
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert_follows(trainer)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert bool(trainer.vllm_generation._adapter_request) == (alone is None)
