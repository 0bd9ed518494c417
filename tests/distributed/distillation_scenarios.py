# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of distillation. One rank has all images of a step, then the other."""

from functools import partial

import torch
from accelerate import PartialState
from helpers.chats import image
from helpers.families import FAMILIES
from peft import LoraConfig
from training import GROUP, Injecting, row, train

from trl_multimodal_rft import MultimodalDistillationTrainer


def rows():
    picture = image(84, 56)["image"]
    return [row(f"What is it? {i}", image=picture if i % 2 == i // 2 else None) for i in range(4)]


def teacher(distance=0.05):
    model, _ = FAMILIES["qwen2_5_vl"].build()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter += distance * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model


def distill(folder, make_teacher=lambda: None, dataset=None, **options):
    """Runs two updates on two prompts each."""
    return train(
        folder,
        "qwen2_5_vl",
        dataset or rows(),
        2 * GROUP,
        MultimodalDistillationTrainer,
        reward_func=make_teacher(),
        sampler=Injecting,
        **options,
    )[1]


ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
distill_teacher = partial(distill, make_teacher=teacher)
distill_parts = partial(distill, make_teacher=teacher, beta=0.5, max_tokens_per_microbatch=50)
distill_top_k = partial(distill, make_teacher=teacher, beta=0.5, loss_top_k=5)
distill_view = partial(distill, teacher_view="blank")
distill_adapter = partial(distill, student_view="blank", self_teacher="base", objects={"peft_config": ADAPTER})


def distill_average(folder):
    """The teacher sees an image where the student has none."""
    crop = image(28, 56)["image"]
    dataset = [{**each, "teacher_image": None if each["image"] else crop} for each in rows()]
    return distill(folder, dataset=dataset, self_teacher="ema(rate=0.5)")


def distill_several(folder):
    """Each rank has rows of a teacher that the other rank has no rows of, and one has a row without a teacher."""
    dataset = [{**each, "teacher_id": name} for each, name in zip(rows(), ["near", "far", "far", None], strict=True)]
    teachers = {"near": teacher(), "far": teacher(0.2)}
    return distill(folder, dataset=dataset, beta=0.5, objects={"teacher_models": teachers})


def distill_separate(folder):
    """One rank has the rows of a teacher of another family and tokenizer, the other those of two others."""
    path = FAMILIES["llava"].save(folder / "teacher")  # only rank 0 writes
    PartialState().wait_for_everyone()
    dataset = [{**each, "teacher_id": name} for each, name in zip(rows(), ["far", "far", "near", None], strict=True)]
    objects = {"teacher_models": {"near": teacher(), "far": str(path)}}
    skips = "separate(on_unaligned='skip')"  # some completions are incomplete characters alone
    return distill(folder, dataset=dataset, teacher_processor=skips, objects=objects)


def distill_best(folder):
    """The teacher sees the best other completion of the group, whose halves may be on two ranks."""

    def reward(completion_ids, **kwargs):
        return [float(sum(ids) % 5) for ids in completion_ids]

    objects = {"reward_funcs": reward}
    return distill(folder, self_teacher="current(shows_best=True, min_reward=2)", beta=0.5, objects=objects)
