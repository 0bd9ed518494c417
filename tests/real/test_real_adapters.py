# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained model that hears, after two updates with LoRA: saved, merged and loaded again, it answers the same, and in
a chat.
"""

import pytest
import torch
from helpers.real_models import REAL, folder, rows_of
from helpers.trainer_utils import make_trainer, norm, update_of
from peft import LoraConfig, PeftModel
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft import MultimodalGRPOTrainer, cli
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.extras import chat
from trl_multimodal_rft.policy import Fallbacks
from trl_multimodal_rft.rewards import accuracy_reward


pytestmark = REAL
OPTIONS = {
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "max_completion_length": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "self_check": True,
}
LENGTH = 6  # tokens of an answer
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], exclude_modules=".*audio_tower.*")


def answers(model, processor, rows):
    settings = EvaluationConfig(max_completion_length=LENGTH)
    result = evaluate(model, processor, rows, accuracy_reward, settings)
    assert 0 <= result.metrics["accuracy"] <= 1 and result.metrics["rows"] == len(rows)
    return [row["completions"] for row in result.rows]


def load_again(path):
    return Qwen2AudioForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


def chatted(path, rows):
    """Answers of the page to the same questions, as its users ask."""
    gradio_client = pytest.importorskip("gradio_client")
    page = chat.run(cli._parser("chat").parse_args([str(path), "--max_completion_length", str(LENGTH)]), waits=False)
    try:
        replies = []
        for row in rows:
            client = gradio_client.Client(page.local_url, verbose=False)  # a conversation of its own
            files = [gradio_client.handle_file(row["audio"]["path"])]
            message = {"text": row["prompt"][0]["content"], "files": files}
            replies.append(client.predict(message, api_name="/chat"))
        return [trained["content"] for trained, _ in replies]  # the second is the base model's
    finally:
        page.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # gradio's use of pandas
def test_saved_model_answers_the_same(tmp_path):
    rows = rows_of("sound", 2)
    base = folder("sound")
    output = tmp_path / "model"
    trainer = make_trainer(
        MultimodalGRPOTrainer, None, rows, output, objects={"model": base, "peft_config": LORA}, **OPTIONS
    )
    assert norm(update_of(trainer)) > 0.01
    # Of the trainer, as a user runs it
    assert trainer.checks.self_check.fallbacks == Fallbacks()
    trainer.save_model()
    trainer.create_model_card(model_name="Hears", dataset_name="spoken sums")
    card = (output / "README.md").read_text()
    assert "audio-text-to-text" in card and "library_name: peft" in card and "- Updates: 2" in card
    processor = AutoProcessor.from_pretrained(output)
    expected = answers(trainer.model, processor, rows)
    adapted = PeftModel.from_pretrained(load_again(base), output)
    assert answers(adapted, processor, rows) == expected
    with adapted.disable_adapter():
        assert answers(adapted, processor, rows) != expected
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert answers(load_again(tmp_path / "merged"), processor, rows) == expected
    assert chatted(output, rows) == [text for (text,) in expected]
