# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of distillation. One rank has all images of a step, then the other."""

import torch
from helpers.chats import image
from helpers.families import FAMILIES
from peft import LoraConfig
from training import GROUP, Injecting, row, train

from trl_multimodal_rft import MultimodalDistillationTrainer


class InjectingDistillation(MultimodalDistillationTrainer):
    """Never samples."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Injecting(self)


def rows():
    picture = image(84, 56)["image"]
    return [row(f"What is it? {i}", image=picture if i % 2 == i // 2 else None) for i in range(4)]


def teacher():
    model, _ = FAMILIES["qwen2_5_vl"].build()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model


def distill(folder, teacher_model=None, dataset=None, **options):
    """Runs two updates on two prompts each."""
    return train(
        folder,
        "qwen2_5_vl",
        dataset or rows(),
        2 * GROUP,
        InjectingDistillation,
        reward_func=teacher_model,
        **options,
    )[1]


def distill_teacher(folder):
    return distill(folder, teacher())


def distill_parts(folder):
    return distill(folder, teacher(), beta=0.5, max_tokens_per_microbatch=50)


def distill_top_k(folder):
    return distill(folder, teacher(), beta=0.5, loss_top_k=5)


def distill_view(folder):
    return distill(folder, teacher_view="blank")


def distill_adapter(folder):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return distill(folder, student_view="blank", self_teacher="base", objects={"peft_config": adapter})


def distill_average(folder):
    """The teacher sees an image where the student has none."""
    crop = image(28, 56)["image"]
    dataset = [{**each, "teacher_image": None if each["image"] else crop} for each in rows()]
    return distill(folder, dataset=dataset, self_teacher="ema", teacher_update_rate=0.5)
