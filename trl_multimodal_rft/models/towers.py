# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which part of a model sees, which part hears, and which weights stay as they are."""

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..families import family_of


def find_tower(model: PreTrainedModel, modality: str) -> str:
    """Finds the encoder of a modality."""
    other = family_of(model).towers.get(modality)
    if other is not None:
        return other
    encoder = model.get_encoder(modality=modality)
    # Where there is none, `get_encoder` returns a model
    name = next((name for name, module in model.named_modules() if module is encoder), "")
    if isinstance(encoder, PreTrainedModel) and encoder.get_decoder() is model.get_decoder():
        name = ""
    if not name:
        raise ValueError(f"{type(model).__name__} has no {modality} encoder to freeze; drop the argument.")
    return name


def freeze_as_built(model: PreTrainedModel) -> None:
    """
    Freezes the weights of a loaded model that its architecture keeps as they are, such as the positions of Whisper's
    encoder: `from_pretrained` makes every weight one to train.
    """
    if is_deepspeed_zero3_enabled():  # which loads weights in place
        return
    with torch.device("meta"):
        built = type(model)(model.config)
    fixed = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)
