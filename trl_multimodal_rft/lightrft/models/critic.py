# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A critic whose `forward` takes sequences and their number of actions, as in LightRFT, and which loads a path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...families import family_of
from ...forward.attention import install_prefix_attention
from ...forward.logprobs import completion_values
from ...forward.masks import sharing_obstacle
from ...models import critic as critic_module
from ...models.modes import checkpoint_activations
from ...models.pretrained import policy_class, read_config
from .bare_inputs import on_action_columns, padded_completions


class Critic(critic_module.Critic):
    """
    A [`~models.Critic`] with the arguments of LightRFT's `CriticVL`.

    Args:
        pretrain_or_model (`str` or [`~transformers.PreTrainedModel`]):
            Name or path of a model, a reward model or a saved critic, see [`~models.Critic.from_pretrained`], or a
            model of the policy's class. A [`~models.ValueHead`] replaces its LM head.
        use_flash_attention_2, bf16, device_map (*optional*, default to `False`, `True` and `None`):
            How a path is loaded, see [`Actor`]. An instance stays as it is.
        lora_rank, load_in_4bit (*optional*, default to `0` and `False`):
            Have to be 0 and `False`, as all weights of a critic are trained.
        lora_alpha, lora_dropout, target_modules, normalize_reward, init_value_head, value_head_prefix (*optional*):
            Have no effect: there is no LoRA, and values are 0 before training unless the path has a head.
        ds_config, packing_samples (*optional*):
            Have no effect: the trainer prepares the critic, and chooses the layout of rows.

    Raises:
        `ValueError`: If a path isn't loadable, or if LoRA or 4-bit weights are requested.
    """

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0,
        target_modules: str | list[str] | None = None,
        normalize_reward: bool = False,
        ds_config: dict | None = None,
        init_value_head: bool = False,
        value_head_prefix: str = "score",
        device_map: dict | str | None = None,
        packing_samples: bool = False,
        *,
        load_in_4bit: bool = False,
    ):
        if lora_rank > 0 or load_in_4bit:
            option = f"lora_rank={lora_rank}" if lora_rank > 0 else "load_in_4bit=True"
            raise ValueError(f"`{option}` isn't supported for a critic, all of whose weights are trained; remove it.")
        if isinstance(pretrain_or_model, (str, Path)):
            name = str(pretrain_or_model)
            options: dict[str, Any] = {"dtype": torch.bfloat16 if bf16 else "auto"}
            if device_map is not None:
                options["device_map"] = device_map
            if use_flash_attention_2:
                options["attn_implementation"] = "flash_attention_2"
            config, model_class = read_config(name)
            if not model_class.can_generate():  # a saved critic names the class of its backbone
                config.architectures = None
                model_class = policy_class(config)
            loaded = critic_module.Critic.from_pretrained(name, model_class, **options)
            super().__init__(loaded.model)
            self.head = loaded.head
        else:
            super().__init__(pretrain_or_model)
        if not sharing_obstacle(
            self.model
        ):  # the experience maker also scores packed rows, in which prompts are shared
            install_prefix_attention(self.model)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Makes the backward pass recompute activations, see [`Actor.gradient_checkpointing_enable`]."""
        checkpoint_activations(self.model, gradient_checkpointing_kwargs or {"use_reentrant": False})

    def gradient_checkpointing_disable(self) -> None:
        """Makes forwards store activations for the backward pass again."""
        checkpoint_activations(self.model, enable=False)

    def forward(
        self,
        sequences: torch.LongTensor,
        num_actions: int | None = None,
        attention_mask: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """
        Returns the value of the state before each action, see [`Actor.forward`] for the arguments.

        Returns:
            `torch.Tensor`: Values, float32, shape `(B, A)`. Without `num_actions`, the value of the state after each
            token, shape `(B, S)`.

        Raises:
            [`MediaError`]: If placeholders and media don't match.
            `ValueError`: If the number of actions doesn't match the sequences.
        """
        if num_actions is None:
            return super().forward(sequences, attention_mask, **inputs)
        request, is_action = padded_completions(self.model, sequences, attention_mask, num_actions, inputs)
        request = replace(request, packed=False, isolate=family_of(self.model).isolate)
        values = completion_values(super().forward, self.model, request)
        return on_action_columns(values, request.mask, is_action)
