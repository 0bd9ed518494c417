# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A value model that sees and hears what the policy does."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ..packing import install_prefix_attention, sharing_obstacle
from .inputs import bare_inputs


_HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """
    A multimodal backbone with a value head: the expected return of the state before each token.

    The head is linear, in float32, and starts at 0, so that the first values are 0. It runs through the same packed forward
    as the policy, see [`~packing.forward.completion_values`].

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of the policy's family. Its LM head is replaced by the value head.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        if not sharing_obstacle(model):
            install_prefix_attention(model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        model.set_output_embeddings(self.head)
        self.model = model

    def forward(
        self,
        sequences: torch.LongTensor,
        num_actions: int | None = None,
        attention_mask: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """
        Values of the states before the actions.

        Args:
            sequences (`torch.LongTensor`):
                Prompts and responses, shape `(B, S)`.
            num_actions (`int`, *optional*):
                Number of action tokens `A`, the last ones. `None` gives the value after every token.
            attention_mask (`torch.Tensor`, *optional*):
                1 on tokens, shape `(B, S)`; all ones by default.
            inputs (`torch.Tensor`):
                Media, per-token fields and positions by the names of the model's forward.

        Returns:
            `torch.Tensor`: Values, float32, shape `(B, A)`, or `(B, S)` without `num_actions`.

        Raises:
            [`MediaError`]: If placeholders and media don't agree.
            `ValueError`: If the number of actions doesn't fit the sequences.
        """
        length = sequences.size(1)
        if num_actions is not None:
            if not 0 <= num_actions < length:
                raise ValueError(f"`num_actions` ({num_actions}) must be between 0 and {length - 1}.")
            # Called with bare tensors, as an actor is
            inputs = bare_inputs(self.model, sequences, inputs, num_actions)
        mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
        # Not the model's own forward, which may cap or scale what its head returns
        backbone = self.model.base_model
        hidden = backbone(input_ids=sequences, attention_mask=mask, use_cache=False, **inputs).last_hidden_state
        values = self.head(hidden.float())[..., 0]
        return values if num_actions is None else values[:, length - 1 - num_actions : length - 1]

    def save_pretrained(self, folder: str | Path) -> None:
        """
        Saves the backbone as transformers does, and the head beside it.

        Args:
            folder (`str` or `Path`):
                Where to.
        """
        self.model.base_model.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in self.head.state_dict().items()}, Path(folder, _HEAD))

    @classmethod
    def from_pretrained(cls, folder: str | Path, model_class: type[PreTrainedModel], **kwargs) -> "Critic":
        """
        Loads what [`save_pretrained`] wrote.

        Args:
            folder (`str` or `Path`):
                Where from.
            model_class (`type`):
                Class of the model, that of the policy.
            kwargs:
                Arguments of its `from_pretrained`.

        Returns:
            [`Critic`]: The critic.
        """
        critic = cls(model_class.from_pretrained(folder, **kwargs))
        critic.head.load_state_dict(load_file(Path(folder, _HEAD)))
        return critic
