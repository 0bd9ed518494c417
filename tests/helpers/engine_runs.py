# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Short runs whose completions vLLM's own engine samples."""

import vllm_cpu

from helpers.trainer_utils import length_and_sum, saved


def make(trainer_class, config_class, family, rows, tmp_path, objects=None, engine=None, **options):
    """A trainer of three updates of all weights in float32, with options for its config and engine."""
    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": True,
        "vllm_engine_kwargs": {**vllm_cpu.ENGINE, "max_model_len": 512, **(engine or {})},
        **options,
    }
    args = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    objects = {"model": str(saved(family)), "reward_funcs": length_and_sum, "train_dataset": rows, **(objects or {})}
    return trainer_class(args=args, **objects)
