# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which scenarios run with which engine."""

DDP, FSDP2, ZERO1, ZERO2, ZERO3 = ENGINES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
SHARDED = [FSDP2, ZERO3]  # those that shard weights
PARTS = [FSDP2, ZERO1, ZERO2, ZERO3]  # those that shard anything

# What an engine can break. ZeRO-1 has the first, and some of `IN_TURN`: its parts are those of ZeRO-2, and no forward
# pass gathers anything
WITH_EACH = {"whole_groups_checkpointed": "hooks of layers that run again"}
WITHOUT_ZERO1 = {
    "not_finite": "the norm of a gradient in parts",
    "resumed_reference": "checkpoints of two models",
    "offloaded": "optimizer states that are moved and brought back",
    "mixed_vision": "ranks that skip an encoder in which others gather",
}
# Weights in shards are gathered in a forward pass, and have checkpoints of their own; ZeRO-2's are whole
WITH_SHARDED_WEIGHTS = {
    "hybrid": "layers of two kinds, which are wrapped and gathered apart",
    "without_signal": "ranks that skip a forward pass in which others gather",
    "papo_token_budget": "two forward passes for each backward, several times before a reduction",
    "adapter_images": "frozen weights beside trained ones, and their checkpoints",
    "mixed_omni": "ranks that skip two encoders, each another one",
    "mixed_critic": "two models with encoders",
    "ppo_saved": "checkpoints of two models",
}
# The others differ before the forward pass or after it, by tensors of their ranks alone, or break what one of the
# scenarios above does. With DDP they show what is reduced, and with one engine that shards, each in its turn, that
# nothing in between asks for more. Those that differ in one thing from another take turns with it.
IN_TURN = {
    "straddling_groups": FSDP2,
    "clips": ZERO1,
    "rloo": ZERO2,
    "token_budget": ZERO2,
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
    "adapter_audio": ZERO2,
    "offloaded_adapter": ZERO2,
    "offloaded_ppo": ZERO1,
    "ppo_images": FSDP2,
    "ppo_shared_trunk": ZERO2,
    "ppo_adapter": ZERO2,
    "ppo_parts": ZERO2,
    "ppo_resumed": FSDP2,
    "balanced": ZERO2,
    "balanced_ppo": FSDP2,
    "balanced_token_weights": FSDP2,
    "parts": ZERO3,
    "parts_adapter": FSDP2,
    "parts_ppo": FSDP2,
    "parts_resumed": FSDP2,
    "sft_rows": ZERO2,
    "sft_parts": FSDP2,
    "sft_adapter": FSDP2,
    "dpo_pairs": FSDP2,
    "dpo_parts": ZERO2,
    "dpo_adapter": ZERO3,
    "dpo_answers": FSDP2,
    "dpo_resumed": FSDP2,
    "kto_parts": FSDP2,
    "reward_pairs": ZERO3,
    "reward_parts": ZERO2,
    "reward_resumed": FSDP2,
    "rewarded_by_models": ZERO3,
    "distill_teacher": ZERO2,
    "distill_parts": ZERO3,
    "distill_top_k": FSDP2,
    "distill_view": ZERO2,
    "distill_adapter": FSDP2,
    "distill_average": FSDP2,
    "ppo_mixed": ZERO2,
    "mixed_deepstack": ZERO3,
    "mixed_audio": ZERO2,
    "mixed_padded": FSDP2,
    "mixed_accumulated": FSDP2,
    "mixed_accumulated_checkpointed": ZERO3,
    "mixed_parts": ZERO3,
    "mixed_parts_shared": FSDP2,
    "mixed_adapted": FSDP2,
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
