# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vision-language policy."""

from .actor import Actor


class ActorVL(Actor):
    """
    A policy for prompts with images and videos.

    The class and its methods take the arguments of [`Actor`].

    Example:

    ```python
    actor = ActorVL("Qwen/Qwen2.5-VL-7B-Instruct", lora_rank=16, lora_alpha=32)
    sequences, attention_mask, action_mask = actor.generate(**processor_output, max_new_tokens=100)
    ```
    """

    modality = "vision"
