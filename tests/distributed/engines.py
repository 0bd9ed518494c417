# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which scenarios run with which engine."""

DDP, FSDP2, ZERO1, ZERO2, ZERO3 = ENGINES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
SHARDED = [FSDP2, ZERO3]  # those that shard weights
PARTS = [FSDP2, ZERO1, ZERO2, ZERO3]  # those that shard anything

# What an engine can break. ZeRO-1 has the first, and some of `IN_TURN`: its parts are those of ZeRO-2, and no forward
# pass gathers anything
WITH_EACH = {"whole_groups_checkpointed": "hooks of layers that run again"}
WITHOUT_ZERO1 = {
    "token_budget": "several forward and backward passes before a reduction",
    "papo_token_budget": "two forward passes for each backward, several times before a reduction",
    "adapter_images": "frozen weights beside trained ones, and their checkpoints",
    "adapter_audio": "frozen weights beside trained ones, and their checkpoints",
    "not_finite": "the norm of a gradient in parts",
    "resumed_reference": "checkpoints of two models",
    "offloaded": "optimizer states that are moved and brought back",
    "ppo_adapter": "two models in one optimizer, one with frozen weights",
    "ppo_parts": "two models with several passes each",
    "balanced": "ranks that exchange what they forward",
    "mixed_vision": "ranks that skip an encoder in which others gather",
    "mixed_omni": "ranks that skip two encoders, each another one",
    "parts_adapter": "groups of weights with rates of their own, of which some are frozen",
    "ppo_resumed": "checkpoints of two models",
}
# Weights in shards are gathered in a forward pass, and have checkpoints of their own; ZeRO-2's are whole
WITH_SHARDED_WEIGHTS = {
    "hybrid": "layers of two kinds, which are wrapped and gathered apart",
    "without_signal": "ranks that skip a forward pass in which others gather",
    "mixed_accumulated": "encoders that run in one micro-batch of several",
    "mixed_parts": "encoders that run in one of several passes",
    "mixed_adapted": "encoders whose weights are frozen beside adapters",
    "mixed_critic": "two models with encoders",
    "parts_ppo": "two models with groups of weights",
    "parts_resumed": "checkpoints of groups of weights",
    "ppo_saved": "checkpoints of two models",
    "sft_adapter": "frozen weights beside trained ones",
    "dpo_pairs": "a second model, which is sharded like the first, and ranks with more forwards than others",
    "dpo_adapter": "a reference that is the policy without its adapter",
    "distill_teacher": "a second model, which is sharded like the first",
    "distill_adapter": "a teacher that is the student without its adapter",
}
# The others differ before the forward pass or after it, by tensors of their ranks alone. With DDP they show what is
# reduced, and with one engine that shards, each in its turn, that nothing in between asks for more.
IN_TURN = {
    "straddling_groups": FSDP2,
    "clips": ZERO1,
    "rloo": ZERO2,
    "rloo_token_budget": FSDP2,
    "split_groups": FSDP2,
    "papo": FSDP2,
    "vppo": FSDP2,
    "mapo": ZERO1,
    "views": ZERO2,
    "asynchronous": FSDP2,
    "reinforce": ZERO1,
    "reinforce_baseline": ZERO2,
    "gmpo": FSDP2,
    "current_entropies": FSDP2,
    "sampled": ZERO2,
    "offloaded_adapter": ZERO3,
    "offloaded_ppo": ZERO1,
    "ppo_images": FSDP2,
    "ppo_shared_trunk": ZERO2,
    "balanced_ppo": FSDP2,
    "balanced_token_weights": FSDP2,
    "parts": ZERO3,
    "sft_rows": ZERO2,
    "sft_parts": FSDP2,
    "dpo_parts": ZERO3,
    "dpo_answers": FSDP2,
    "dpo_resumed": FSDP2,
    "kto_parts": FSDP2,
    "reward_pairs": FSDP2,
    "reward_parts": ZERO3,
    "reward_resumed": FSDP2,
    "rewarded_by_models": ZERO3,
    "distill_parts": ZERO3,
    "distill_top_k": FSDP2,
    "distill_view": ZERO2,
    "distill_average": FSDP2,
    "ppo_mixed": ZERO2,
    "mixed_deepstack": ZERO3,
    "mixed_audio": ZERO2,
    "mixed_padded": FSDP2,
    "mixed_accumulated_checkpointed": ZERO3,
    "mixed_parts_shared": ZERO2,
    "mixed_adapted_language": FSDP2,
    "mixed_adapted_projector": ZERO3,
}


def engines_of(scenario: str) -> list[str]:
    """Returns the engines of a scenario of the tables."""
    if scenario in WITH_SHARDED_WEIGHTS:
        return [DDP, *SHARDED]
    if scenario in WITHOUT_ZERO1:
        return [engine for engine in ENGINES if engine != ZERO1]
    return ENGINES if scenario in WITH_EACH else [DDP, IN_TURN[scenario]]
