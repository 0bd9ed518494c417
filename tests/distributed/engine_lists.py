# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Which scenarios run with which engine.

With DDP, all of them show what ranks gather and reduce. With an engine that shards, a scenario shows what that engine
can break: where weights are gathered and gradients reduced, and what the package does for an engine alone. ZeRO-1 is
that of `test_launch_configs.py`: no module of the package tells it from ZeRO-2.
"""

DDP = "ddp"
FSDP2 = "fsdp2"
ZERO2 = "zero2"
ZERO3 = "zero3"
SHARDED = [FSDP2, ZERO3]  # those that shard weights
PARTS = [FSDP2, ZERO2, ZERO3]  # those that shard anything

WITH_EACH = {
    "whole_groups_checkpointed": "hooks of layers that run again",
}
# Weights in shards are gathered in a forward pass, and have checkpoints of their own; ZeRO-2's are whole
WITH_SHARDED_WEIGHTS = {
    "resumed_reference": "checkpoints of two models",
    "ppo_saved": "checkpoints of two models",
    "offloaded": "optimizer states that are moved and brought back; ZeRO-2's are those of `offloaded_ppo`",
    "not_finite": "the norm of a gradient in parts, and non-finite weights of one rank",
}
WITH_ONE = {
    FSDP2: {
        "hybrid": "layers of two kinds, which are wrapped apart",
        "adapter_images": "frozen weights beside trained ones, and their checkpoints",
        "split_groups": "groups in chunks that can't share a forward pass of their prompt",
        "papo": "ranks that have no view, and skip no forward pass of it",
        "papo_token_budget": "two forward passes for each backward, several times before a reduction",
        "mixed_omni": "ranks that skip two encoders, each another one",
        "ppo_images": "a critic and averages that are wrapped with the policy",
        "ppo_resumed": "groups of parameters in checkpoints, with states of their own",
        "parts_adapter": "parts that are frozen and adapted, some with rates of their own",
        "dpo_answers": "ranks that skip encoders of a reference, too",
        "distill_top_k": "a head of the teacher that is gathered outside of a forward pass",
        "distill_average": "averages of weights that the engine replaces",
        "distill_several": "a teacher that a rank forwards for the other's rows",
        "distill_separate": "forwards of a teacher that a rank runs without completions",
        "mixed_critic": "two models with encoders",
        "mixed_deepstack": "features that several layers receive",
        "mixed_padded": "padded rows with dummy inputs",
        "mixed_parts_shared": "parts of which some need an encoder, and a head on the policy",
        "mixed_adapted_projector": "a frozen encoder before trained layers",
    },
    ZERO2: {
        "ppo_parts": "parts of rows of two kinds, whose gradients DeepSpeed must not divide",
        "offloaded_ppo": "a critic that the engine moves with the policy",
        "sft_parts": "parts whose tokens are counted over accumulated micro-batches",
        "distill_view": "dummy inputs of a teacher, which DDP doesn't add, and of encoders that a rank skips",
    },
    ZERO3: {
        "without_signal": "ranks that skip a forward pass in which others gather, and gradients that would be stale",
        "parts": "frozen weights in shards, and numbers of parameters by part",
        "rewarded_by_models": "reward models, which the engine shards, too",
        "distill_parts": "a teacher in parts, some of which have no backward pass",
        "mixed_accumulated_checkpointed": "encoders that one of several micro-batches needs",
    },
}


def engines_of(scenario: str) -> list[str]:
    """Returns the engines of a scenario."""
    if scenario in WITH_EACH:
        return [DDP, *PARTS]
    if scenario in WITH_SHARDED_WEIGHTS:
        return [DDP, *SHARDED]
    return [DDP, *(engine for engine, names in WITH_ONE.items() if scenario in names)]
