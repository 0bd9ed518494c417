# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A critic whose `forward` takes sequences and their number of actions, as in LightRFT."""

import torch
from transformers import PreTrainedModel

from ...families import family_of
from ...forward.attention import install_prefix_attention
from ...forward.logprobs import completion_values
from ...forward.masks import sharing_obstacle
from ...models import critic as critic_module
from .bare_inputs import padded_completions


class Critic(critic_module.Critic):
    """
    A [`~models.Critic`] with the arguments of LightRFT's `forward`.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of the policy's class. A [`~models.ValueHead`] replaces its LM head.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        if not sharing_obstacle(model):  # the experience maker also scores packed rows, in which prompts are shared
            install_prefix_attention(model)

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
        batch = padded_completions(self.model, sequences, attention_mask, num_actions, inputs)
        request = batch.request(packed=False, isolate=family_of(self.model).isolate)
        return batch.scatter(completion_values(super().forward, self.model, request))
