# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The model card says on what and how a model was trained, and its code runs."""

import os
import re
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import soundfile
from huggingface_hub import ModelCard
from peft import LoraConfig
from trainer_utils import InjectedOurs, audio_rows, image_rows, make_trainer, saved, text_rows

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows", "kind", "pipeline"),
    [
        (MultimodalGRPOTrainer, "qwen2_audio", audio_rows, "audio", "audio-text-to-text"),
        (MultimodalPPOTrainer, "qwen2_5_vl", image_rows, "image", "image-text-to-text"),
        (MultimodalRLOOTrainer, "qwen2_5_vl", text_rows, None, None),
    ],
)
def test_card_of_a_run(trainer_class, family, rows, kind, pipeline, tmp_path):
    trainer = make_trainer(trainer_class, family, rows(8), tmp_path / "model", max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="Answers", dataset_name="someone/questions", tags="digits")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == pipeline
    assert {"trl", "trl-multimodal-rft", "digits", *([kind] if kind else [])} <= set(card.data.tags)
    assert card.data.datasets == "someone/questions"
    assert "`prompt`" in card.text and (kind is None or f"`{kind}`" in card.text)
    assert f"https://huggingface.co/papers/{trainer._paper['id']}" in card.text
    assert "self-check: packed = padded" in card.text
    assert "- Rewards: `length_and_sum`" in card.text and "- Updates: 1" in card.text
    for package in ("TRL", "Transformers", "PyTorch", "trl-multimodal-rft"):
        assert re.search(rf"- {package}: \d+\.\d+", card.text)
    assert run_code(card.text, tmp_path)


def test_card_of_an_adapter(tmp_path):
    objects = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", image_rows(8), tmp_path / "model", objects=objects, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "model" / "README.md").read_text()
    assert "PeftModel" in text and str(saved("qwen2_5_vl")) in text
    assert run_code(text, tmp_path)


def run_code(text: str, folder) -> str:
    """What the card's quick start prints, beside the files that it names."""
    soundfile.write(folder / "audio.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 8000).astype("float32"), 16000)
    PIL.Image.new("RGB", (56, 84), "red").save(folder / "image.png")
    (code,) = re.findall(r"## Quick start\n\n```python\n(.*?)```", text, re.DOTALL)
    code = code.replace("print(processor.decode(answer, ", "print('answer:', processor.decode(answer, ")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "answer:" in result.stdout
    return result.stdout
