# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What tests of the reference interface share."""

from collections import Counter

import numpy as np
import torch

from trl_multimodal_rft.lightrft.trainer.experience import Experience


def media_of(experience: Experience) -> dict[str, torch.Tensor]:
    """Media of an experience by the names of the actors' forward."""
    names = {"image_grid_thws": "image_grid_thw", "video_grid_thws": "video_grid_thw"}
    fields = ["pixel_values", "pixel_values_videos", *names, "audio_values", "audio_attention_mask"]
    media = {names.get(name, name): getattr(experience, name, None) for name in fields}
    extra = getattr(experience, "extra_media", None) or {}
    return {name: value for name, value in {**media, **extra}.items() if value is not None}


def drawn_completions(prompts, config, pad_id: int, eos_id: int, drawn: Counter) -> torch.Tensor:
    """Pseudo-random completions that depend on the prompt and how often it was sampled, most of which end."""
    rows = []
    for prompt in prompts:
        generator = np.random.default_rng([int(prompt.input_ids.sum()), drawn[prompt]])
        drawn[prompt] += 1
        ids = generator.integers(50, 300, generator.integers(2, config.max_new_tokens + 1)).tolist()
        if len(ids) < config.max_new_tokens or generator.random() < 0.5:
            ids[-1] = eos_id
        rows.append(torch.tensor(ids))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
