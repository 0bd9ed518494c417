# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the colocated engine samples, compared with the model's own forward."""

import pytest
import torch
import vllm_cpu
from helpers.trainer_utils import audio_rows, image_rows, length_and_sum, saved, video_rows

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids


class Recorded(MultimodalGRPOTrainer):
    """Remembers, of each draw, the largest difference of the engine's log-probabilities to the model's own."""

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        model, worst = self._unwrapped(self.model), 0.0
        banned = sorted(all_placeholder_ids(model, self.processing_class))
        for prompt, ids, sampled in zip(self._batch.prompts, completions, logps, strict=True):
            sequence = torch.cat([prompt.input_ids, torch.tensor(ids)])[None]
            fields = {k: torch.nn.functional.pad(v, (0, len(ids)))[None] for k, v in prompt.token_fields.items()}
            with torch.no_grad():
                logits = model(sequence, attention_mask=torch.ones_like(sequence), **fields, **prompt.media).logits
            logits = logits[0, len(prompt) - 1 : -1].float()
            logits[:, banned] = -torch.inf
            own = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(sampled)).abs().max().item())
        self.differences = [*getattr(self, "differences", []), worst]
        return completions, logps


def make(trainer_class, config_class, family, rows, tmp_path, **options):
    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": True,
        "vllm_engine_kwargs": {**vllm_cpu.ENGINE, "max_model_len": 512},
        **options,
    }
    args = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    return trainer_class(str(saved(family)), length_and_sum, args, train_dataset=rows)


@pytest.mark.parametrize(
    ("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", video_rows), ("qwen2_5_vl", image_rows)]
)
def test_what_is_sampled_is_what_is_scored(family, rows, tmp_path):
    trainer = make(Recorded, MultimodalGRPOConfig, family, rows(), tmp_path)
    rendering = trainer.vllm_generation.llm.renderer.get_mm_processor()
    calls, apply = [], rendering._apply_hf_processor_main
    rendering._apply_hf_processor_main = lambda *args, **kwargs: calls.append(1) or apply(*args, **kwargs)
    trainer.train()
    assert max(trainer.differences) < 1e-4 and len(trainer.differences) == 3  # after two updates of all weights
    assert len(calls) == 3 * 2  # once per prompt, not per completion
