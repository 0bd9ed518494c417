# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft estimate`: whether a training run fits into the memory of its GPUs."""

import argparse
import json

from ..cli.parsers import OPTIMIZERS, SHARDS
from ..reporting.console import parts_lines
from .micro_batch import Usage, measure


GIB = 2**30
# Share of a GPU's memory for a run; CUDA, NCCL and fragmentation take the remaining memory
USABLE = 0.9
# bitsandbytes stores half a byte per weight, a byte per 64 weights and a float per 64 * 256 weights
BYTES_IN_4_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)
# What to change first, by the largest sum
_REMEDIES = {
    "weights": "`--use_peft --load_in_4bit`, or more GPUs with `--strategy fsdp2`",
    "gradients and optimizer": "`--use_peft`, or more GPUs with `--strategy fsdp2`",
    "activations": "`--gradient_checkpointing`, or a smaller `--max_tokens_per_microbatch`",
    "sampling": "a smaller `--steps_per_generation` or `--vllm_gpu_memory_utilization`, or `--vllm_mode server`",
}


def _states(args: argparse.Namespace, trained: int, frozen: int, width: int, frozen_width: int) -> tuple[float, float]:
    """Returns a GPU's bytes of weights, and of gradients and optimizer. A width is the bytes of one trained weight."""
    # Bytes of optimizer state per trained weight, or per byte of the trained weights if `per_byte`
    factor, per_byte = OPTIMIZERS[args.optim]
    width = 4 if args.strategy == "fsdp2" else width  # accelerate casts trained weights to float32
    sizes = [width * trained + frozen_width * frozen, width * trained, factor * (width if per_byte else 1) * trained]
    if args.strategy.startswith("zero"):  # half precision, and a float32 copy of trained weights in the optimizer
        sizes = [2 * (trained + frozen), 2 * trained, (4 + factor * (4 if per_byte else 1)) * trained]
    shards = SHARDS[args.strategy]
    weights, gradients, optimizer = (
        size / (args.gpus if is_sharded else 1) for size, is_sharded in zip(sizes, shards, strict=True)
    )
    if args.strategy == "ddp":
        gradients *= 2  # and buckets
    elif args.strategy.startswith("zero"):
        gradients += 2 * min(trained, 5e8)  # `reduce_bucket_size`
    return weights, gradients + optimizer


def _cache_bytes(usage: Usage, n_tokens: int) -> float:
    """Layers with a sliding window keep only the window's tokens."""
    return sum(size * min(n_tokens, window or n_tokens) for size, window in usage.cache)


def memory(args: argparse.Namespace, usage: Usage) -> dict[str, float]:
    """Returns a GPU's bytes: four sums, and its peaks during update and generation."""
    loaded_width = 4 if args.dtype == "float32" else 2
    adapter_width = 2 if args.load_in_4bit else 4
    everything = usage.trained + usage.frozen
    weights, trained_states = _states(
        args, usage.trained, usage.frozen, adapter_width if args.use_peft else loaded_width, loaded_width
    )
    weights -= usage.in_4_bits * (loaded_width - BYTES_IN_4_BITS)
    critic_weights, critic_states = _states(args, usage.critic, usage.frozen_critic, loaded_width, loaded_width)
    weights += critic_weights
    if args.beta > 0 and not args.use_peft:  # with adapters, the reference is the base model
        width = 2 if args.strategy.startswith("zero") else loaded_width
        weights += everything * width / (args.gpus if SHARDS[args.strategy][0] else 1)
    # Weights that sharded runs gather, and copies that autocast makes of others
    gathered = gathered_to_sample = 0.0
    if args.strategy == "fsdp2":  # two layers, the gradient of one layer, the embeddings and the head
        gathered = gathered_to_sample = 2.0 * (3 * usage.layer + usage.embeddings_and_head)
    elif args.strategy == "zero3":  # `stage3_max_live_parameters`; all weights to sample
        gathered = 2.0 * min(everything, 1e9)
        gathered_to_sample = 2.0 * (everything + usage.critic + usage.frozen_critic)
    elif args.bf16 and loaded_width == 4 and not args.strategy.startswith("zero"):
        gathered = 2.0 * (everything + usage.critic + usage.frozen_critic)
    # Completions share the keys and values of their prompt
    n = args.per_device_train_batch_size * args.steps_per_generation
    n_prompts = n / min(n, args.num_generations)
    cache = n_prompts * _cache_bytes(usage, args.prompt_tokens) + n * _cache_bytes(usage, args.completion_tokens)
    sampling = gathered_to_sample + cache
    engine = 0.0
    if args.use_vllm:
        sampling = engine = args.vllm_gpu_memory_utilization * args.gpu_memory * GIB * (args.vllm_mode == "colocate")
    if args.trainer == "sft":
        sampling = engine = 0.0
    states = trained_states + critic_states
    update = weights + states + gathered + usage.activations + (0.0 if args.vllm_enable_sleep_mode else engine)
    generation = weights + sampling + (0.0 if args.offload_during_generation else states)
    return {
        "weights": weights,
        "gradients and optimizer": states,
        "activations": gathered + usage.activations,
        "sampling": sampling,
        "update": update,
        "generation": generation,
        "peak": max(update, generation),
    }


def estimate(args: argparse.Namespace) -> dict:
    """Measures a run. Returns whether it fits, its memory, and what to change if it doesn't fit."""
    if args.load_in_4bit and not args.use_peft:
        raise ValueError("`--load_in_4bit` freezes the model; add `--use_peft` to train adapters.")
    if args.strategy == "single" and args.gpus > 1:
        raise ValueError(f"`--strategy single` uses one GPU; for {args.gpus} GPUs, choose `ddp`, `fsdp2` or another.")
    usage = measure(args)
    sizes = memory(args, usage)
    result = {"fits": sizes["peak"] <= USABLE * args.gpu_memory * GIB, "memory": sizes, "measured": vars(usage)}
    return result if result["fits"] else {**result, "advice": _REMEDIES[max(_REMEDIES, key=sizes.__getitem__)]}


def run(args: argparse.Namespace) -> None:
    result = estimate(args)
    if args.json:
        print(json.dumps(result))
        return
    usage = result["measured"]
    print(f"{args.model_name_or_path}, {args.strategy} on {args.gpus} x {args.gpu_memory:g} GiB: GiB on each GPU")
    for name, size in result["memory"].items():
        print(f"  {name:24} {size / GIB:8.1f}")
    print(
        f"{(usage['trained'] + usage['frozen']) / 1e9:.2f} B weights, of which {usage['trained'] / 1e9:.2f} B are "
        f"trained; forwards of up to {usage['tokens']:,} tokens."
    )
    print(*parts_lines(usage["modules"]), sep="\n")
    if usage["left_out"]:
        print(f"Media encoders aren't counted, but for their weights: {usage['left_out']}.")
    usable = f"{USABLE:.0%} of {args.gpu_memory:g} GiB"
    print(
        f"Fits into {usable}." if result["fits"] else f"Doesn't fit into {usable}. Change first: {result['advice']}."
    )
