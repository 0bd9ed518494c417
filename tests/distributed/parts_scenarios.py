# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios with frozen parts, and with learning rates of parts."""

from accelerate import PartialState
from peft import LoraConfig
from ppo_scenarios import ppo
from training import ENGINE, GROUP, ZERO, compared, image_rows, refusal, train


PARTS = {"freeze": "vision_tower", "learning_rates": {"projector": 0.05, "lm_head": 0.2}}


def parts(folder):
    """All weights that train get gradients, so that DDP need not search for unused ones."""
    options = {"gradient_checkpointing": True, "ddp_find_unused_parameters": False, **PARTS}
    return train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, lr_scheduler_type="linear", **options)[1]


def parts_adapter(folder):
    """The reference switches adapters off and on again."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    options = {"beta": 0.1, "freeze": "vision_tower", "learning_rates": {"projector": 0.05}}
    options["gradient_checkpointing"] = ENGINE != "zero3"  # TRL makes it reentrant there
    return train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, objects={"peft_config": lora}, **options)[1]


def parts_ppo(folder):
    options = {"freezing_actor_steps": 0, "ptx_coef": 0.3, **PARTS}
    return ppo(folder, gradient_checkpointing=False, ddp_find_unused_parameters=False, **options)[1]


def parts_resumed(folder):
    options = {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 4, "weight_decay": 0.1, "save_steps": 2}
    options |= {"freeze": "vision_tower", "learning_rates": {"projector": 0.05}, "lr_scheduler_type": "linear"}
    options["save_strategy"] = "steps"
    _, straight = train(folder / "straight", "qwen2_5_vl", image_rows(), 2 * GROUP, **options)
    PartialState().wait_for_everyone()
    checkpoint = folder / "straight" / "output" / "checkpoint-2"
    _, result = train(folder / "again", "qwen2_5_vl", image_rows(), 2 * GROUP, checkpoint=checkpoint, **options)
    options |= {"freeze": "projector", "learning_rates": None, "checkpoint": checkpoint}
    message = refusal(train, folder / "other", "qwen2_5_vl", image_rows(), 2 * GROUP, **options)
    return compared(straight, result) | {"message": message}


def parts_of_deepspeed(folder):
    """The config has an optimizer or a scheduler of its own, which have one rate."""
    messages = []
    own = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    own |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    for name in own:
        zero = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        zero |= {name: own[name], "zero_optimization": {"stage": ZERO[ENGINE]}}
        rates = {"learning_rates": {"projector": 0.05}, "deepspeed": zero}
        messages.append(refusal(train, folder / name, "qwen2_5_vl", image_rows(), 2 * GROUP, **rates))
    return {"messages": messages}
