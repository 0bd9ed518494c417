# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An audio-language policy."""

import inspect

import torch

from ...data.reading.refs import MediaError
from ...families import AUDIO_FEATURES, AUDIO_MASKS, family_of
from .actor import Actor
from .bare_inputs import has_too_few_placeholders


class ActorAL(Actor):
    """
    A policy that answers prompts with audio.

    Arguments are those of [`Actor`].

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
    _sees = False

    def forward(
        self,
        sequences: torch.LongTensor,
        num_actions: int | list[int] | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
        audio_values: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        **media: torch.Tensor | None,
    ):
        """
        Log-probabilities of the actions, the last tokens of each sequence, see [`Actor.forward`].

        Args:
            pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw (`torch.Tensor`, *optional*):
                Ignored here, so that all actors have the same call; [`ActorOmni`] uses them, see [`Actor.forward`].
            audio_values (`torch.Tensor`, *optional*):
                Features of all clips, shape `(number of clips, mel bands, frames)` or in the family's order.
            audio_attention_mask (`torch.Tensor`, *optional*):
                1 on the frames of a clip, shape `(number of clips, frames)`, as the processor returns it. All ones by
                default, for clips that fill the frames.
            media (`torch.Tensor`):
                Further inputs of the family.
        """
        if not self._sees:
            pixel_values = image_grid_thw = pixel_values_videos = video_grid_thw = None
        vision = (pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, return_output, packed_seq_lens)
        audio = self._audio(sequences, audio_values, audio_attention_mask)
        return super().forward(sequences, num_actions, attention_mask, *vision, **audio, **media)

    def generate(
        self,
        input_ids: torch.Tensor,
        audio_values: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Samples completions to prompts with audio, see [`Actor.generate`]; for the media see [`ActorAL.forward`].
        """
        audio = self._audio(input_ids, audio_values, audio_attention_mask)
        return super().generate(input_ids, **audio, **kwargs)

    def _audio(
        self, sequences: torch.Tensor, values: torch.Tensor | None, mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Features and mask under the names of the family."""
        model = self.base_model
        accepted = inspect.signature(type(model).forward).parameters
        features = next((name for name in AUDIO_FEATURES if name in accepted), None)
        mask_name = next((name for name in AUDIO_MASKS if name in accepted), None)
        if values is not None and features is None:
            raise TypeError(f"{type(model).__name__} takes no audio.")
        if mask is not None and mask_name is None:
            raise TypeError(f"{type(model).__name__} takes no mask of audio.")
        if values is not None and mask is None and mask_name is not None and family_of(model).has_frame_mask:
            # Bands come before frames for Whisper's features, after them for others
            bands_first = hasattr(model.get_encoder(modality="audio").config, "num_mel_bins")
            mask = values.new_ones(len(values), values.size(2 if bands_first else 1), dtype=torch.bool)
            if has_too_few_placeholders(model, sequences, "audio", {mask_name: mask}):
                raise MediaError(
                    "`audio_attention_mask` is missing, and the clips are shorter than their padded features; pass "
                    f"the processor's `{mask_name}` as `audio_attention_mask`."
                )
        return {name: value for name, value in ((features, values), (mask_name, mask)) if name and value is not None}


class ActorOmni(ActorAL):
    """
    A policy that answers prompts with images, videos and audio.

    Arguments are those of [`Actor`], the media those of [`ActorVL`] and [`ActorAL`].
    """

    modality = "multimodal"
    _sees = True
