# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An adapter on a 4-bit policy trains as on the same weights without quantization."""

import pytest
import torch
from helpers.four_bits import NF4, save_wide, trained
from helpers.trainer_utils import audio_rows, image_rows, norm, relative_difference
from peft import PeftModel

from trl_multimodal_rft.lightrft import ActorAL


bnb = pytest.importorskip("bitsandbytes")

CASES = {"audio": ("qwen2_audio", audio_rows), "image": ("qwen2_5_vl", image_rows)}
TOWERS = {"audio": "audio_tower", "image": "visual"}


@pytest.mark.parametrize("kind", CASES)
def test_trains_as_on_the_weights_in_full(kind, tmp_path):
    """The policy samples in evaluation mode between the updates, where bitsandbytes uses kernels without gradients."""
    family, rows = CASES[kind]
    model_class = save_wide(family, tmp_path / "model")
    trainer, update, before = trained(tmp_path / "model", str(tmp_path / "model"), rows, tmp_path / "four")
    layers = {name for name, module in trainer.model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert all(any(part in name for name in layers) for part in ("language_model", TOWERS[kind]))
    after = dict(trainer.model.named_parameters())
    assert all("lora_" in name for name in update) and norm(update) > 0.01
    assert all(torch.equal(after[name], value) for name, value in before.items() if name not in update)
    assert min(trainer.checks.self_check.media.values()) > 0.1

    full = model_class.from_pretrained(tmp_path / "model", quantization_config=NF4, dtype=torch.float32).dequantize()
    assert not any(isinstance(module, bnb.nn.Linear4bit) for module in full.modules())
    expected = trained(tmp_path / "model", full, rows, tmp_path / "full")[1]
    assert relative_difference(expected, update) <= 1e-3  # of kernels that round in their own ways

    trainer.save_model(tmp_path / "saved")
    base = model_class.from_pretrained(tmp_path / "model", quantization_config=NF4, dtype=torch.float32)
    again = dict(PeftModel.from_pretrained(base, tmp_path / "saved").named_parameters())
    assert all(torch.equal(again[name].to(value.dtype), value) for name, value in after.items())


def test_actor_has_the_same_gradient_after_it_sampled(tmp_path):
    save_wide("qwen2_audio", tmp_path)
    actor = ActorAL(str(tmp_path), load_in_4bit=True, bf16=False, lora_rank=4)
    ids = torch.arange(50, 62)[None]
    mask = torch.ones_like(ids)

    def gradient():
        actor.zero_grad()
        actor(ids, 4, mask).sum().backward()
        return {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}

    before = gradient()
    actor.eval()
    actor.generate(ids, attention_mask=mask, max_new_tokens=3)
    actor.train()
    assert norm(before) > 0 and relative_difference(before, gradient()) <= 1e-5
