# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft estimate --suggest`: the config of a run that fits into the memory of its GPUs."""

import argparse
from collections.abc import Iterator
from typing import Any

import yaml

from .estimate import GIB, USABLE, Usage, measure_with_note, target_modules, verdict


# Completions per update by trainer; in supervised training, rows per update
_PER_UPDATE = {"grpo": 64, "ppo": 64, "sft": 32}
# Names of accelerate configs by strategy
_ACCELERATE = {"single": "single_gpu", "ddp": "multi_gpu", "fsdp2": "fsdp2"}
_LORA = {"use_peft": True, "dtype": "bfloat16"}
# Keys of the suggested config. A switch is a boolean key, written only if it is true, together with its further keys.
_KEYS = ("model_name_or_path", "accelerate_config", "num_processes", "bf16", "dtype", "gradient_checkpointing")
_KEYS += ("optim", "per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_microbatch")
_SAMPLING_KEYS = ("steps_per_generation", "num_generations", "max_completion_length", "packing", "beta")
_SWITCHES = {
    "shared_trunk": (),
    "use_peft": ("lora_r", "lora_alpha", "lora_target_modules", "lora_modules_to_save", "learning_rate"),
    "load_in_4bit": (),
}
_VLLM_KEYS = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
_SAMPLING_SWITCHES = {"use_vllm": _VLLM_KEYS, "offload_during_generation": ()}


def run(args: argparse.Namespace) -> None:
    """
    Tries full training, LoRA and QLoRA, in this order, and prints the config of the first method that fits, with the
    largest micro-batches that fit.
    """
    min_peak = float("inf")
    for method in _methods(args):
        fit = None  # options, peak and usage of the largest micro-batches so far that fit
        for size in _micro_batch_sizes(args):
            step_counts = _step_counts(args, size)
            options = {**method, "per_device_train_batch_size": size, "gradient_accumulation_steps": step_counts[0]}
            usage, _ = measure_with_note(argparse.Namespace(**{**vars(args), **options}))
            for steps in step_counts:  # in descending order
                options = {**options, "steps_per_generation": steps}
                result = verdict(argparse.Namespace(**{**vars(args), **options}), usage)
                peak = result["memory"]["peak"]
                min_peak = min(min_peak, peak)
                if result["fits"]:
                    fit = options, peak, usage
                    break
            else:
                break  # larger micro-batches don't fit, either
        if fit is not None:
            print(_config_text(args, *fit), end="")
            return
    raise ValueError(
        f"nothing fits into {USABLE:.0%} of {args.gpu_memory:g} GiB: the smallest run takes {min_peak / GIB:.3g} GiB. "
        "Take a smaller model, shorter completions (`--completion_tokens`), more GPUs (`--gpus`), or GPUs with more "
        "memory."
    )


def _methods(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    strategies = ["single"] if args.gpus == 1 else ["ddp", "fsdp2"]
    # For PPO, full training is tried with a separate critic first. All other variants have a critic on the policy.
    trunk = {"shared_trunk": True} if args.trainer == "ppo" else {}
    variants: list[dict[str, Any]] = [trunk, {**_LORA, **trunk}, {**_LORA, **trunk, "load_in_4bit": True}]
    if trunk:
        variants = [{}, *variants]
    for options in variants:
        if all(options.get(name) for name in ("use_peft", "load_in_4bit") if getattr(args, name)):
            # Weights in 4 bits aren't sharded
            possible_strategies = strategies[:1] if options.get("load_in_4bit") else strategies
            for strategy in possible_strategies:
                yield {"strategy": strategy, **options}


def _micro_batch_sizes(args: argparse.Namespace) -> list[int]:
    """Returns numbers of completions per micro-batch to try: the divisors of a group's size, or of 8 rows for SFT."""
    largest = 8 if args.trainer == "sft" else args.num_generations
    return [size for size in range(1, largest + 1) if largest % size == 0]


def _step_counts(args: argparse.Namespace, size: int) -> list[int]:
    """
    Returns values of `steps_per_generation` for which rollouts hold whole groups, in descending order. With the first,
    a rollout is as large as an update. For micro-batches of 2 on one GPU, and groups of 8, they are 32, 16, 8 and 4.
    """
    # `n_completions`: in one step of all GPUs
    n_completions = size * args.gpus
    group_size = 1 if args.trainer == "sft" else args.num_generations
    steps = max(1, -(-_PER_UPDATE[args.trainer] // n_completions))
    steps = -(-steps * n_completions // group_size) * group_size // n_completions  # up to whole groups
    return [n for n in range(steps, 0, -1) if steps % n == 0 and n * n_completions % group_size == 0]


def _config_text(args: argparse.Namespace, options: dict[str, Any], peak: float, usage: Usage) -> str:
    has_sampling = args.trainer != "sft"
    values = {
        **vars(args),
        **options,
        "accelerate_config": _ACCELERATE[options["strategy"]],
        "num_processes": args.gpus,
        "max_tokens_per_microbatch": usage.tokens,
        "max_completion_length": args.completion_tokens,
        "lora_alpha": 2 * args.lora_r,
        "lora_target_modules": target_modules(args),
        "learning_rate": 1e-5,
    }
    values["shared_trunk"] &= args.trainer == "ppo"
    switches = {**_SWITCHES, **(_SAMPLING_SWITCHES if has_sampling else {})}
    names = [*_KEYS, *(_SAMPLING_KEYS if has_sampling else ())]
    for switch, more_keys in switches.items():
        if values[switch]:
            names += [switch, *more_keys]
    if args.gpus == 1:
        names.remove("num_processes")
    reward_funcs = " --reward_funcs ..." if has_sampling else ""
    keys = {name: values[name] for name in names if name != "lora_modules_to_save" or values[name]}
    return (
        f"# {peak / GIB:.3g} of {args.gpu_memory:g} GiB of each GPU, with prompts of {usage.prompt_tokens} tokens "
        f"and completions of {args.completion_tokens}, by `trl-multimodal-rft estimate`. Run it with\n"
        f"# trl-multimodal-rft {args.trainer} --config FILE --dataset_name ...{reward_funcs} "
        f"--output_dir ...\n{yaml.safe_dump(keys, sort_keys=False)}"
    )
