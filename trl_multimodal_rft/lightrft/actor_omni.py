# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A policy that sees and hears."""

import torch

from .actor import Actor
from .actor_al import ActorAL


class ActorOmni(ActorAL):
    """
    A policy that answers prompts with images, videos and audio.

    Arguments are those of [`Actor`], the media those of [`ActorVL`] and [`ActorAL`].
    """

    modality = "multimodal"

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
        """See [`ActorVL.forward`] and [`ActorAL.forward`], whose arguments are all in use."""
        return Actor.forward(
            self,
            sequences,
            num_actions,
            attention_mask,
            return_output,
            packed_seq_lens,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            **self._audio(audio_values, audio_attention_mask),
            **media,
        )
