# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Two updates of each trainer on a GPU, with bfloat16 autocast, and the self-check of each family."""

import math

import pytest
import torch
from helpers.devices import gpu_only
from helpers.distillation_runs import teacher
from helpers.four_bits import LORA
from helpers.trainer_utils import AS_SHIPPED, PLAIN, audio_rows, image_rows, load, make_trainer, video_rows
from trainers.supervised.test_sft import picture_rows

from trl_multimodal_rft import (
    MultimodalDistillationTrainer,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.checks.rounding import NOISE_FACTOR


GRPO = MultimodalGRPOTrainer
PPO = MultimodalPPOTrainer
TEACHER = {"reward": None, "teacher_view": "blank"}
RUNS = {
    "grpo": (GRPO, "qwen2_5_vl", {"beta": 0.04, "num_iterations": 2, "self_check": True}),
    "grpo, checkpointing, parts": (
        GRPO,
        "qwen2_5_vl",
        {"activation_checkpointing": True, "max_tokens_per_microbatch": 60},
    ),
    "grpo, parts of groups, frozen tower": (
        GRPO,
        "qwen2_5_vl",
        {"max_tokens_per_microbatch": 30, "freeze": ["vision_tower"], "activation_checkpointing": True},
    ),
    "grpo, sound": (GRPO, "qwen2_audio", {}),
    "grpo, videos": (GRPO, "qwen3_vl", {}),
    "grpo, experts": (GRPO, "qwen3_vl_moe", {}),
    "grpo, windows": (GRPO, "gemma3", {}),
    "grpo, linear attention": (GRPO, "qwen3_5", {}),
    "grpo, sound in videos' model": (GRPO, "qwen2_5_omni", {}),
    "grpo, one prompt per forward": (GRPO, "llava_onevision", {}),
    "grpo, padded": (GRPO, "qwen2_5_vl", {"packing": "padded", "self_check": True}),
    "grpo, adapter": (GRPO, "qwen2_5_vl", {"peft_config": LORA, "self_check": True}),
    "grpo, sampled again": (GRPO, "qwen2_5_vl", {"dynamic_sampling": 4, "replay_buffer_size": 8}),
    "grpo, entropies, logged": (
        GRPO,
        "qwen2_5_vl",
        {
            "top_entropy_quantile": 0.5,
            "entropy_source": "rollout",
            "log_completions": True,
            "media_contribution_steps": 1,
        },
    ),
    "papo and vppo": (GRPO, "qwen2_5_vl", {"loss_view": "blank(kl_coef=0.01, token_quantile=0.4)"}),
    "rollouts of a view": (GRPO, "qwen2_5_vl", {"rollout_view": "blank"}),
    "rloo": (MultimodalRLOOTrainer, "qwen2_5_vl", {"beta": 0.04}),
    "ppo": (PPO, "qwen2_5_vl", {}),
    "ppo, one trunk": (PPO, "qwen2_5_vl", {"shared_trunk": True}),
    "distillation": (MultimodalDistillationTrainer, "qwen2_5_vl", {"reward": None}),
    "distillation, own view": (MultimodalDistillationTrainer, "qwen2_5_vl", TEACHER),
    "distillation, average": (
        MultimodalDistillationTrainer,
        "qwen2_5_vl",
        {**TEACHER, "self_teacher": "ema", "loss_top_k": 4},
    ),
    "sft": (MultimodalSFTTrainer, "qwen2_5_vl", {"packing": False}),
    "sft, packed": (MultimodalSFTTrainer, "qwen2_5_vl", {"packing": True, "max_length": 200}),
}
ROWS = {"qwen2_audio": audio_rows, "qwen3_vl": video_rows, "qwen2_5_omni": audio_rows}
# Runs whose code other runs, or tests of their family, show on the stand-in for a GPU
COVERED = ["checkpointing, parts", "sound", "experts", "windows", "linear attention"]
COVERED = [*(f"grpo, {each}" for each in COVERED), "distillation, own view", "sft"]


def make(name, device, folder):
    trainer_class, family, options = RUNS[name]
    model, processor = load(family)
    objects = {"model": model, "processing_class": processor}
    # Without options of its own, a run is the first of its family
    options = {"use_cpu": device == "cpu", "bf16": True, "learning_rate": 1e-3, "self_check": not options, **options}
    if trainer_class is MultimodalSFTTrainer:
        return trainer_class(
            args=MultimodalSFTConfig(str(folder), **{**PLAIN, **options}), train_dataset=picture_rows(), **objects
        )
    objects["peft_config"] = options.pop("peft_config", None)
    if name == "distillation":
        objects["teacher_model"] = teacher(family)
    rows = ROWS.get(family, image_rows)()
    return make_trainer(trainer_class, None, rows, folder, objects=objects, **{**AS_SHIPPED, **options})


@pytest.mark.parametrize("name", gpu_only(RUNS, *(RUNS.keys() - COVERED)))
def test_two_updates(name, device, tmp_path):
    trainer = make(name, device, tmp_path)
    before = {each: parameter.detach().clone() for each, parameter in trainer.model.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == 2 and len(losses) == 2 and all(map(math.isfinite, losses))
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {device}
    assert any(not torch.equal(parameter, before[each]) for each, parameter in trainer.model.named_parameters())
    assert not any(entry.get("skipped_updates") for entry in trainer.state.log_history)
    if not isinstance(trainer, MultimodalSFTTrainer) and trainer.args.self_check:
        check = trainer.checks.self_check
        packs = trainer.args.packing != "padded"
        assert check.fallbacks.packing == packs and not check.fallbacks.logits_from_model
        if packs:
            check_tolerances(check)


def check_tolerances(check):
    """They require no remedy."""
    limit = check.tolerance + NOISE_FACTOR * check.rounding
    assert check.tolerance > 1e-3 and max(check.padded, check.packed, check.rows, check.sampled) <= limit
    assert check.fallbacks.shared_prefill and min(check.media.values()) > 0
