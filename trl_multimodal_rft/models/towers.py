# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoders of a model, and weights that its architecture freezes."""

from contextlib import suppress

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..families import family_of


def find_tower(model: PreTrainedModel, modality: str) -> str:
    """Returns the dotted name of the encoder of a modality. Raises `ValueError` if the model has none."""
    if (tower := family_of(model).towers.get(modality)) is not None:
        return tower
    encoder = model.get_encoder(modality=modality)
    # Without an encoder, `get_encoder` returns a model with a decoder
    name = next((name for name, module in model.named_modules() if module is encoder), "")
    if isinstance(encoder, PreTrainedModel) and encoder.get_decoder() is model.get_decoder():
        name = ""
    if not name:
        raise ValueError(f"{type(model).__name__} has no {modality} encoder to freeze; drop the argument.")
    return name


def find_towers(model: PreTrainedModel) -> dict[str, str]:
    """Returns the dotted names of a model's encoders by modality, as far as they can be found."""
    towers = {}
    for modality in ("image", "audio"):
        with suppress(ValueError):
            if modality in model.input_modalities:
                towers[modality] = find_tower(model, modality)
    return towers


def freeze_as_built(model: PreTrainedModel) -> None:
    """
    Freezes weights of a loaded model that its architecture freezes, such as the positions of Whisper's encoder:
    `from_pretrained` makes all weights trainable.
    """
    if is_deepspeed_zero3_enabled():  # ZeRO-3 loads weights in place
        return
    with torch.device("meta"):
        built = type(model)(model.config)
    fixed = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)
