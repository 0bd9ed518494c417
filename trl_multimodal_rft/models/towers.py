# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which part of a model sees, which part hears, which layers LoRA may adapt, and which weights stay as they are."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..families import family_of


def find_tower(model: PreTrainedModel, modality: str) -> str:
    """
    Finds the encoder of a modality.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.
        modality (`str`):
            `"image"` or `"audio"`.

    Returns:
        `str`: Dotted name of the module.

    Raises:
        `ValueError`: If the model has no such encoder.
    """
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


def linear_layers(
    model: PreTrainedModel, frozen: Iterable[str] = (), target_modules: str | Iterable[str] | None = None
) -> list[str]:
    """
    Full names of the linear layers that LoRA is to adapt.

    Full, because PEFT compares ends of names, and a tower's layers often end like those of the language model.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.
        frozen (`Iterable[str]`, *optional*):
            Names of modules in which nothing is to be adapted.
        target_modules (`str` or `Iterable[str]`, *optional*):
            Ends of names to choose from; all linear layers but the LM head by default or with `"all-linear"`.

    Returns:
        `list[str]`: Dotted names of the layers.

    Raises:
        `ValueError`: If no layer is left.
    """
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in frozen)
    ]
    if target_modules is not None and target_modules != "all-linear":
        ends = [target_modules] if isinstance(target_modules, str) else list(target_modules)
        names = [name for name in names if any(name == end or name.endswith(f".{end}") for end in ends)]
    if not names:
        raise ValueError(
            f"No linear layer of {type(model).__name__} outside {list(frozen)} has a name that ends in one of "
            f"{target_modules}; `target_modules=None` takes all."
        )
    return names


def freeze_as_built(model: PreTrainedModel) -> None:
    """
    Freezes the weights of a loaded model that its architecture keeps as they are, such as the positions of Whisper's
    encoder:
    `from_pretrained` makes every weight one to train.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model that was loaded.
    """
    if is_deepspeed_zero3_enabled():  # which loads weights in place
        return
    with torch.device("meta"):
        built = type(model)(model.config)
    fixed = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)
