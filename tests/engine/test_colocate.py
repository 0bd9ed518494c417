# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the colocated engine samples, compared with the model's own forward."""

import pytest
import torch
from helpers.engine_runs import make
from helpers.trainer_utils import audio_rows, image_rows, video_rows

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
