# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An audio-language policy."""

import torch

from .actor import Actor
from .bare_inputs import audio_inputs


class ActorAL(Actor):
    """
    A policy for prompts with audio.

    Arguments are those of [`Actor`]. The `forward` of all actors takes images and videos, but this one ignores them;
    [`ActorOmni`] uses them.

    Example:

    ```python
    actor = ActorAL("Qwen/Qwen2-Audio-7B-Instruct", lora_rank=16, lora_alpha=32)
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        audio_values=inputs["input_features"],
        audio_attention_mask=inputs["feature_attention_mask"],
        max_new_tokens=100,
    )
    ```
    """

    modality = "audio"
    _uses_vision = False

    def generate(
        self,
        input_ids: torch.Tensor,
        audio_values: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Samples completions of prompts with audio, see [`Actor.generate`]; audio is passed as in [`Actor.forward`].
        """
        audio = audio_inputs(self.base_model, audio_values, audio_attention_mask)
        return super().generate(input_ids, **audio, **kwargs)


class ActorOmni(ActorAL):
    """
    A policy for prompts with images, videos and audio.

    Arguments are those of [`Actor`]; media are those of [`ActorVL`] and [`ActorAL`].
    """

    modality = "multimodal"
    _uses_vision = True
