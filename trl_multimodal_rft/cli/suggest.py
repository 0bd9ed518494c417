# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft estimate --suggest`: the config of a run that fits into the memory of its GPUs."""

import argparse
from collections.abc import Iterator
from typing import Any

import yaml

from .estimate import GIB, USABLE, Measured, measured_with_note, verdict


# Completions per update, or rows in supervised training
_PER_UPDATE = {"grpo": 64, "ppo": 64, "sft": 32}
_ACCELERATE = {"single": "single_gpu", "ddp": "multi_gpu", "fsdp2": "fsdp2"}
_LORA = {"use_peft": True, "dtype": "bfloat16"}
# Keys of the config, and those that a switch brings
_KEYS = (
    "model_name_or_path",
    "accelerate_config",
    "num_processes",
    "bf16",
    "dtype",
    "gradient_checkpointing",
    "optim",
)
_KEYS += ("per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_microbatch")
_KEYS_OF_SAMPLING = ("steps_per_generation", "num_generations", "max_completion_length", "packing", "beta")
_SWITCHES = {
    "shared_trunk": (),
    "use_peft": ("lora_r", "lora_alpha", "lora_target_modules", "learning_rate"),
    "load_in_4bit": (),
}
_VLLM = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
_OF_SAMPLING = {"use_vllm": _VLLM, "offload_during_generation": ()}


def run(args: argparse.Namespace) -> None:
    """
    Prints the first config that fits, from full training over LoRA to QLoRA, from large micro-batches to small ones.
    """
    limit = USABLE * args.gpu_memory * GIB
    smallest, known = float("inf"), {}
    n_weights = 0

    def judged(options: dict[str, Any]) -> tuple[bool, float, Measured]:
        """Whether options fit, their memory, and the measurements."""
        nonlocal smallest
        given = argparse.Namespace(**{**vars(args), **options})
        # Measurements depend on the engine by the dtype alone
        key = (given.use_peft, given.load_in_4bit, given.shared_trunk, given.strategy == "fsdp2")
        key = (*key, given.per_device_train_batch_size)
        if key not in known:
            known[key], _ = measured_with_note(given)
        result = verdict(given, known[key])
        smallest = min(smallest, result["memory"]["peak"])
        return result["fits"], result["memory"]["peak"], known[key]

    for options in _ways(args):
        held = 0.5 if options.get("load_in_4bit") else 2
        if n_weights * held / (args.gpus if options["strategy"] == "fsdp2" else 1) > limit:
            continue  # the frozen weights alone
        fits, _, measured = judged({**options, **_batch(args, 1)})
        n_weights = n_weights or measured.trained + measured.frozen
        if not fits:
            continue
        largest = 8 if args.trainer == "sft" else args.num_generations
        for size in [*_halves(largest), 1]:
            batch = _batch(args, size)
            if not judged({**options, **batch})[0]:
                continue
            # As many completions at once as keys and values allow
            for steps in _steps(args, batch):
                fits, peak, measured = judged({**options, **batch, "steps_per_generation": steps})
                if fits:
                    print(_text(args, {**options, **batch, "steps_per_generation": steps}, peak, measured), end="")
                    return
    least = f"at least {smallest / GIB:.3g} GiB" if smallest < float("inf") else "more"
    raise ValueError(
        f"nothing fits into {USABLE:.0%} of {args.gpu_memory:g} GiB: a run takes {least}. Take a smaller model, "
        "shorter completions (`--completion_tokens`), more GPUs (`--gpus`), or GPUs with more memory."
    )


def _ways(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trained weights and strategies, from full training to the smallest memory."""
    strategies = ["single"] if args.gpus == 1 else ["ddp", "fsdp2"]
    trunk = {"shared_trunk": True} if args.trainer == "ppo" else {}
    trained: list[dict[str, Any]] = [{}, trunk, {**_LORA, **trunk}, {**_LORA, **trunk, "load_in_4bit": True}]
    for each in trained[1:] if trunk == {} else trained:
        if all(each.get(name) for name in ("use_peft", "load_in_4bit") if getattr(args, name)):
            for strategy in strategies if not each.get("load_in_4bit") else strategies[:1]:
                yield {"strategy": strategy, **each}


def _halves(n: int) -> Iterator[int]:
    while n > 1:
        yield n
        n = max(size for size in range(1, n // 2 + 1) if n % size == 0)


def _batch(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Micro-batches of a size, enough for an update of whole groups."""
    together = size * args.gpus
    steps = -(-_PER_UPDATE[args.trainer] // together)
    if args.trainer != "sft":
        steps = -(-steps * together // args.num_generations) * args.num_generations // together
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": max(1, steps),
        "steps_per_generation": 1,
    }


def _steps(args: argparse.Namespace, batch: dict[str, Any]) -> list[int]:
    """Numbers of micro-batches that may be sampled at once, in whole groups, from all down."""
    steps, size = batch["gradient_accumulation_steps"], batch["per_device_train_batch_size"] * args.gpus
    group = 1 if args.trainer == "sft" else args.num_generations
    return [n for n in range(steps, 0, -1) if steps % n == 0 and n * size % group == 0]


def _text(args: argparse.Namespace, options: dict[str, Any], peak: float, measured: Measured) -> str:
    samples = args.trainer != "sft"
    values = {
        **vars(args),
        **options,
        "accelerate_config": _ACCELERATE[options["strategy"]],
        "num_processes": args.gpus,
        "max_tokens_per_microbatch": measured.tokens,
        "max_completion_length": args.completion_tokens,
        "lora_alpha": 2 * args.lora_r,
        "lora_target_modules": "all-linear",
        "learning_rate": 1e-5,
    }
    values["shared_trunk"] &= args.trainer == "ppo"
    switches = {**_SWITCHES, **(_OF_SAMPLING if samples else {})}
    names = [*_KEYS, *(_KEYS_OF_SAMPLING if samples else ())]
    names += [each for switch, others in switches.items() if values[switch] for each in (switch, *others)]
    keys = {name: values[name] for name in names if name != "num_processes" or args.gpus > 1}
    return (
        f"# {peak / GIB:.3g} of {args.gpu_memory:g} GiB of each GPU, with prompts of {measured.prompt_tokens} tokens "
        f"and completions of {args.completion_tokens}, by `trl-multimodal-rft estimate`. Run it with\n"
        f"# trl-multimodal-rft {args.trainer} --config FILE --dataset_name ...{' --reward_funcs ...' * samples} "
        f"--output_dir ...\n{yaml.safe_dump(keys, sort_keys=False)}"
    )
