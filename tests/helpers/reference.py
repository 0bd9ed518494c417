# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media and injected completions for tests of LightRFT's interface."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
import torch

from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.lightrft.trainer import experience_maker
from trl_multimodal_rft.lightrft.trainer.experience import Experience
from trl_multimodal_rft.lightrft.trainer.experience_maker import NaiveExperienceMaker


def media_of(experience: Experience) -> dict[str, torch.Tensor]:
    """Returns the media of an experience by the argument names of an actor's `forward`."""
    names = {"image_grid_thws": "image_grid_thw", "video_grid_thws": "video_grid_thw"}
    fields = ["pixel_values", "pixel_values_videos", *names, "audio_values", "audio_attention_mask"]
    media = {names.get(name, name): getattr(experience, name, None) for name in fields}
    extra = getattr(experience, "extra_media", None) or {}
    return {name: value for name, value in {**media, **extra}.items() if value is not None}


def completing(complete: Callable[[Sequence[EncodedPrompt], int], list[list[int]]]) -> AbstractContextManager:
    """Returns a context in which experience makers get completions from `complete(prompts, max_new_tokens)`."""

    def sample(forward, model, prompts, generation_config, pad_token_id, **options):
        rows = map(torch.tensor, complete(prompts, generation_config.max_new_tokens))
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_token_id)

    return patch.object(experience_maker, "sample_completions", sample)


def pseudo_random(prompts: Sequence[EncodedPrompt], longest: int, eos_id: int, drawn: Counter) -> list[list[int]]:
    """Returns completions that depend on a prompt and its draws so far, counted in `drawn`. Most completions end."""
    rows = []
    for prompt in prompts:
        generator = np.random.default_rng([int(prompt.input_ids.sum()), drawn[prompt]])
        drawn[prompt] += 1
        ids = generator.integers(50, 300, generator.integers(2, longest + 1)).tolist()
        if len(ids) < longest or generator.random() < 0.5:
            ids[-1] = eos_id
        rows.append(ids)
    return rows


class Injected(NaiveExperienceMaker):
    """Experience maker with injected completions, see [`pseudo_random`]."""

    def generate_samples(self, all_prompts, **generate_kwargs):
        drawn = self.__dict__.setdefault("drawn", Counter())
        eos_id = self.tokenizer.eos_token_id
        with completing(lambda prompts, longest: pseudo_random(prompts, longest, eos_id, drawn)):
            return super().generate_samples(all_prompts, **generate_kwargs)
