# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading of models and adapters for actors."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from ...data.reading.decoding import require_module
from ...models.pretrained import trained_part
from ...models.towers import freeze_as_built


def cast_parameters(model: nn.Module, base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts parameters as `from_pretrained` does, without buffers, whose rounding would change rotary positions."""
    kept = tuple(base._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.to(dtype)


def load_model(
    path: str | Path,
    model_class: type | None,
    use_flash_attention_2: bool,
    bf16: bool,
    load_in_4bit: bool,
    device_map: dict | str | None,
) -> PreTrainedModel:
    """Loads a model with the class that its config names, see [`Actor`]."""
    if model_class is None:
        model_class = trained_part(str(path))
    if model_class is None:
        config = AutoConfig.from_pretrained(path)
        model_class = getattr(
            transformers, (config.architectures or ["AutoModelForCausalLM"])[0], AutoModelForCausalLM
        )
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    options: dict[str, Any] = {
        "attn_implementation": "flash_attention_2" if use_flash_attention_2 else None,
        "device_map": device_map,
        "quantization_config": quantization if load_in_4bit else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    model = model_class.from_pretrained(path, dtype=torch.bfloat16 if bf16 else "auto", **options)
    freeze_as_built(model)
    return model


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: int,
    dropout: float,
    target_modules: str | list[str] | None,
    frozen: list[str],
) -> nn.Module:
    """
    Adds a LoRA adapter to a model, which keeps its mode: to layers whose names end in one of `target_modules`, or to
    all linear ones but the LM head, outside of the modules `frozen`.
    """
    peft = require_module("peft", "peft")

    if target_modules in (None, "all-linear"):
        # PEFT would shorten the names that it finds: "0" of a merger would match whole blocks of Qwen3-Omni
        head = model.get_output_embeddings()
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        target_modules = [name for name, module in layers if module is not head]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        # A pattern of whole names: layers of an encoder often end like those of the language model
        exclude_modules=rf"({'|'.join(map(re.escape, frozen))})\..*" if frozen else None,
        bias="none",
    )
    before = set(model.modules())
    try:
        adapted = peft.get_peft_model(model, config)
    except peft.utils.error.NoMatchingPeftModuleError as error:
        raise ValueError(
            f"No layer of {type(model).__name__} outside {frozen} has a name that ends in one of {target_modules}; "
            "`target_modules=None` takes all."
        ) from error
    for module in adapted.modules():
        if module not in before:
            module.training = model.training  # a loaded model has no dropout
    return adapted
