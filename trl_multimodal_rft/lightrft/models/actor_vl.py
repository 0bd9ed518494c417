# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vision-language policy."""

import torch

from .actor import Actor


class ActorVL(Actor):
    """
    A policy that answers prompts with images and videos.

    Arguments are those of [`Actor`].

    Example:

    ```python
    actor = ActorVL("Qwen/Qwen2.5-VL-7B-Instruct", lora_rank=16, lora_alpha=32)
    sequences, attention_mask, action_mask = actor.generate(**processor_output, max_new_tokens=100)
    ```
    """

    modality = "vision"

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
        **media: torch.Tensor | None,
    ):
        """
        Log-probabilities of the actions, the last tokens of each sequence, see [`Actor.forward`].

        Args:
            pixel_values, pixel_values_videos (`torch.Tensor`, *optional*):
                Images and videos of all sequences, in the shape of the family: for Qwen, patches of shape
                `(sum of patches, D)`.
            image_grid_thw, video_grid_thw (`torch.Tensor`, *optional*):
                Patches of each of them in time, height and width, shape `(number, 3)`.
            media (`torch.Tensor`):
                Further inputs of the family, such as `image_sizes` or `pixel_attention_mask`.
        """
        return super().forward(
            sequences,
            num_actions,
            attention_mask,
            return_output,
            packed_seq_lens,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            **media,
        )

    def generate(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Samples completions to prompts with images and videos, see [`Actor.generate`]; for the media see
        [`ActorVL.forward`].
        """
        return super().generate(
            input_ids,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            **kwargs,
        )
