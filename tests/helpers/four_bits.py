# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models with 4-bit weights."""

import copy

import torch
from peft import LoraConfig
from transformers import AutoProcessor, BitsAndBytesConfig

from helpers.families import FAMILIES
from helpers.trainer_utils import InjectedOurs, make_trainer


NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def save_wide(family, folder):
    """Saves a tiny model of a family, wide enough for the 64 weights of a 4-bit block. Returns the model's class."""
    model, processor = FAMILIES[family].build()
    config = copy.deepcopy(model.config)
    if family == "qwen2_audio":
        config.audio_config.d_model = 64
        config.audio_config.encoder_ffn_dim = 128
        config.text_config.intermediate_size = 128
    else:
        config.vision_config.hidden_size = 64
        config.vision_config.intermediate_size = 128
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


def trained(folder, model, rows, output, **more):
    """
    Trains a model with LoRA. If `model` is a path, the trainer loads it in 4 bits. Returns the trainer, the updates of
    trained parameters, and all parameters before the training.
    """
    options = {"beta": 0.1, "learning_rate": 1.0, "self_check": True, **more}
    processor = AutoProcessor.from_pretrained(folder)
    objects = {"model": model, "processing_class": processor, "peft_config": LORA}
    if isinstance(model, str):
        objects["quantization_config"] = NF4
        options["model_init_kwargs"] = {"dtype": "float32"}
    trainer = make_trainer(InjectedOurs, None, rows(), output, objects=objects, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return trainer, {n: p.detach() - before[n] for n, p in trainer.model.named_parameters() if p.requires_grad}, before
