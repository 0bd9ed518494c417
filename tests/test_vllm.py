# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What generation by vLLM is handed. The engine itself is a stand-in: it needs hardware and a build of its own."""

import pytest
import torch
from helpers.trainer_utils import audio_rows, image_rows, length_and_sum, load, make_trainer
from PIL import Image
from trl.trainer import grpo_trainer

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.data.columns import MediaError
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids


class Engine:
    error = 0.0  # of its log-probabilities, in nats

    def __init__(self, generation_kwargs, **kwargs):
        self.generation_kwargs, self.requests = generation_kwargs, []

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        self.requests.append((prompts, images))
        completions = torch.tensor([[60 + i % 7, 70, 80] for i in range(len(prompts))])
        with torch.no_grad():
            rows = self.trainer._batch.prompts, completions, torch.ones_like(completions)
            logps = self.trainer._policy.score(self.trainer.model, *rows, packed=False).logps + self.error
        return prompts, completions.tolist(), logps[..., None].tolist(), None


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    return {"use_vllm": True, "vllm_mode": "colocate"}


def test_images_reach_the_engine(vllm, tmp_path):
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, **vllm)
    trainer.vllm_generation.trainer = trainer
    trainer.train()
    prompts, images = trainer.vllm_generation.requests[0]
    assert len(prompts) == len(images) == 8
    assert all(isinstance(image, Image.Image) for [image] in images)
    assert images[0][0] is images[3][0] and images[0][0] is not images[4][0]
    placeholders = all_placeholder_ids(trainer.model, trainer.processing_class)
    assert all(trainer.vllm_generation.generation_kwargs["logit_bias"][i] == -100 for i in placeholders)
    check = trainer._self_check
    assert "packed = model's own" in str(check) and check.sampled is None
    assert check.engine < 1e-5 and "engine = recomputed" in str(check)
    again = MultimodalGRPOTrainer(
        load("qwen2_5_vl")[0], length_and_sum, trainer.args, image_rows(), processing_class=trainer.processing_class
    )
    again.vllm_generation.trainer = again
    again.train()
    assert again._self_check.engine < 1e-5


@pytest.mark.parametrize("correction", [True, False])
def test_an_engine_that_samples_with_other_probabilities_stops_training(correction, vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "error", -0.5)
    options = {**vllm, "vllm_importance_sampling_correction": correction}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, **options)
    trainer.vllm_generation.trainer = trainer
    with pytest.raises(RuntimeError, match="the engine's log-probabilities are 5e-01 from the trainer's"):
        trainer.train()


def test_audio_raises(vllm, tmp_path):
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), tmp_path, **vllm)
    with pytest.raises(MediaError, match=r"row 0, column 'audio'.*use_vllm=False"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"generation_kwargs": {"frequency_penalty": 0.5}}, {"vllm_structured_outputs_regex": "a+"}],
)
def test_an_engine_that_is_told_to_sample_otherwise_is_not_measured(options, vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "error", -0.5)
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, max_steps=1, **vllm, **options)
    trainer.vllm_generation.trainer = trainer
    trainer.train()
    assert trainer._self_check.engine is None
