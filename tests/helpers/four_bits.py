# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models that are loaded with weights of 4 bits."""

import copy

import torch
from transformers import BitsAndBytesConfig

from helpers.families import FAMILIES


NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


def save_wide(family, folder):
    """The tiny model, but wide enough for 4-bit kernels, which take blocks of 64 weights."""
    model, processor = FAMILIES[family].build()
    config = copy.deepcopy(model.config)
    if family == "qwen2_audio":
        config.audio_config.d_model, config.audio_config.encoder_ffn_dim = 64, 128
        config.text_config.intermediate_size = 128
    else:
        config.vision_config.hidden_size, config.vision_config.intermediate_size = 64, 128
        config.text_config.intermediate_size = 128
    torch.manual_seed(0)
    model = type(model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return type(model)
