# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of the commands that aren't launched, without importing what the commands run."""

import argparse
import json
import os
from collections.abc import Collection
from dataclasses import fields
from typing import Any, get_args

from ..data.reading.rules import BUDGET_NAMES, OWN_NAMES, MediaRules
from ..scripts.options import Key, read_config, shipped


# Names of the loaders, by layout
LAYOUTS = {
    "avqa": "load_avqa",
    "audiomcq": "load_audiomcq",
    "mmau": "load_mmau",
    "geometry3k": "load_geo3k",
    "video-r1": "load_video_r1",
    "easyr1": "load_easyr1",
    "verl": "load_verl",
    "deepeyes": "load_deepeyes",
    "mm-eureka": "load_mm_eureka",
    "charades-sta": "load_charades_sta",
    **dict.fromkeys(("sharegpt", "llama-factory", "llava", "ms-swift"), "load_conversations"),
}
# Whether a strategy shards weights, gradients and optimizer state
SHARDS = {
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp2": (True, True, True),
}
# Bytes of optimizer state per byte of a weight (True) or per weight (False)
OPTIMIZERS = {
    "adamw_torch_fused": (2, True),
    "adamw_torch": (2, True),
    "adamw_8bit": (2 + 2 * 4 / 256, False),
    "paged_adamw_8bit": (0, False),
    "sgd": (0, False),
}
_TRUST = "run code that comes with a model"


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="run config or built-in recipe; keys for other commands are ignored")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    text = "sources and sizes of media, as in the trainer's config, as JSON"
    parser.add_argument("--media_rules", type=json.loads, default={}, help=text)


def _add_rules(parser: argparse.ArgumentParser, names: Collection[str] = OWN_NAMES) -> None:
    for rule in fields(MediaRules):
        if rule.name not in names:
            continue
        kind = (get_args(rule.type) or (rule.type,))[0]
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{rule.name}", default=rule.default, help="as in the trainer's config", **options)


def chat(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `chat`."""
    add = parser.add_argument
    model = "folder of a trained model or adapter, or name on the Hub"
    add("model_name_or_path", nargs="?", default=argparse.SUPPRESS, help=model)
    add("--model_name_or_path", required=True, help=argparse.SUPPRESS)  # the name in other commands
    add("--base", help="model to compare with; default for an adapter: the model it was trained on")
    add("--system_prompt", help="system message (default: the one in the model card)")
    add("--max_completion_length", type=int, default=256, help="maximum tokens of an answer")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy decoding")
    _add_rules(parser, BUDGET_NAMES)
    add("--dtype", default="auto", help="dtype of the weights, such as bfloat16; auto keeps the saved one")
    add("--trust_remote_code", action="store_true", help=_TRUST)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows others on the network to connect")
    add("--port", type=int, help="port to listen on (default: the first free one from 7860)")


def check(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `check`."""
    _add_config(parser)
    add = parser.add_argument
    add("--dataset_name", required=True, help="name on the Hub, folder (also one of `save_to_disk`) or file")
    add("--dataset_config", help="configuration of the dataset")
    add("--dataset_split", default="train", help="split to check")
    add("--dataset_streaming", action="store_true", help="stream rows instead of downloading them first")
    add("--prompt", help="template of the column `prompt`, as in training: a text with names of columns in braces")
    add("--system_prompt", help="system message at the start of every prompt")
    add("--model_name_or_path", required=True, help="name on the Hub or folder with config and processor")
    add("--model_revision", help="branch, tag or commit of the model")
    add("--trust_remote_code", action="store_true", help=_TRUST)
    add("--max_prompt_length", type=int, help="maximum tokens of a prompt (default: context minus completion)")
    add("--max_completion_length", type=int, default=256, help="maximum tokens of a completion")
    add("--vllm_max_model_length", type=int, help="context of vLLM's engine, as in the trainer's config")
    add("--audio_overlong", choices=("raise", "truncate"), default="raise", help="as in the trainer's config")
    add("--ignored_media_columns", nargs="+", help="columns with media that only reward functions read")
    _add_rules(parser)
    _add_limits(parser)
    add("--chat_template_kwargs", type=json.loads, default={}, help="arguments of the chat template, as JSON")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--num_workers", type=int, default=cpus, help="worker processes that read and encode rows; 0 uses none")
    add("--output", help="Markdown file for the report")


def of_run_check(keys: dict[str, Key]) -> dict[str, Key]:
    """Options of `check` from a run config."""
    return keys | ({"dataset_split": keys["dataset_train_split"]} if "dataset_train_split" in keys else {})


def estimate(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `estimate`."""
    _add_config(parser)
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="name on the Hub, folder or config.json")
    add("--strategy", choices=[*SHARDS], default="single", help="how weights, gradients and optimizer are sharded")
    add("--gpus", type=int, default=1, help="number of GPUs")
    add("--gpu_memory", type=float, default=80, help="GiB of each GPU")
    add("--trainer", choices=("grpo", "ppo", "sft"), default="grpo", help="RLOO takes the memory of GRPO")
    add("--shared_trunk", action="store_true", help="PPO's critic is a head on the policy")
    add("--beta", type=float, default=0.0, help="KL coefficient; above 0, a reference model is loaded")
    add("--loss_view", help="view in the loss; with `kl_coef` in it, updates forward it for each prompt, too")
    add("--per_device_train_batch_size", type=int, default=8, help="completions per micro-batch on each GPU")
    add("--steps_per_generation", type=int, default=1, help="micro-batches sampled at once")
    add("--num_generations", type=int, default=8, help="completions per prompt")
    add("--prompt_tokens", type=int, default=1152, help="tokens of a prompt, media included")
    add("--completion_tokens", type=int, default=1024, help="tokens of a completion")
    add("--images", type=int, help="images per prompt (default: 1 if the model takes images)")
    add("--image_size", type=int, default=448, help="image edges in pixels, before the processor resizes them")
    _add_rules(parser, ("min_pixels", "max_pixels"))
    add("--audio_seconds", type=float, help="audio per prompt (default: 30 if the model takes audio but no images)")
    add("--packing", choices=("prefix", "padded"), default="prefix", help="prefix: completions share their prompt")
    add("--max_tokens_per_microbatch", type=int, help="maximum tokens of a forward (default: no limit)")
    add("--gradient_checkpointing", action=yes_no, default=True, help="recompute activations in the backward pass")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the loaded weights")
    add("--bf16", action=yes_no, default=True, help="compute in bfloat16 (autocast)")
    add("--optim", choices=[*OPTIMIZERS], default="adamw_torch_fused", help="optimizer")
    add("--freeze", nargs="+", help="parts of the model, or patterns of names, that aren't trained, as in the config")
    add("--use_peft", action="store_true", help="train LoRA adapters on all linear layers")
    add("--lora_r", type=int, default=16, help="rank of the adapters")
    add("--load_in_4bit", action="store_true", help="keep frozen linear layers in 4 bits (QLoRA)")
    add("--use_vllm", action="store_true", help="sample with vLLM")
    add("--vllm_mode", choices=("colocate", "server"), default="colocate", help="on the training's GPUs or on others")
    add("--vllm_gpu_memory_utilization", type=float, default=0.3, help="fraction of each GPU's memory for vLLM")
    add("--vllm_tensor_parallel_size", type=int, default=1, help="GPUs that share vLLM's weights")
    add("--vllm_enable_sleep_mode", action="store_true", help="vLLM frees its memory during updates")
    add("--offload_during_generation", action="store_true", help="what sampling doesn't need waits on the host")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device whose kernels are assumed")
    add("--json", action="store_true", help="print one JSON object")
    add("--suggest", action="store_true", help="print a run config that fits, for `--config` of the trainer")


def of_run_estimate(keys: dict[str, Key]) -> dict[str, Key]:
    """Options of `estimate` from a run config."""
    name = keys["accelerate_config"].value if "accelerate_config" in keys else "single_gpu"
    launch = {**read_config(shipped("accelerate_configs", name)), **keys}
    strategies = {"MULTI_GPU": "ddp", "FSDP": "fsdp2", "NO": "single"}
    kind, stage = launch["distributed_type"], launch.get("deepspeed_config")
    strategy = strategies.get(kind.value, f"zero{stage and stage.value.get('zero_stage')}")
    names = {
        "gpus": "num_processes",
        "completion_tokens": "max_completion_length",
        "steps_per_generation": "gradient_accumulation_steps",  # TRL's default
    }
    options = {option: launch[name] for option, name in names.items() if name in launch}
    if "parallelism_config" in launch:  # of GPUs that hold the same shards, one counts
        sizes = launch["parallelism_config"]
        n = sizes.value.get("parallelism_config_dp_shard_size", 1)
        options["gpus"] = keys.get("parallelism_config_dp_shard_size", sizes._replace(value=n, text=str(n)))
    options |= {**keys, "strategy": kind._replace(value=strategy, text=strategy)}
    if "packing" in keys and keys["packing"].value not in ("prefix", "padded"):  # of supervised rows
        del options["packing"]
    return options


def families(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `families`."""
    parser.add_argument("--only_known", action="store_true", help="list only models with family-specific rules")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `prepare`."""
    add = parser.add_argument
    add("layout", choices=[*LAYOUTS], help="layout of the dataset")
    add("path", help="file or folder, or name of a dataset on the Hub")
    add("--output_dir", required=True, help="folder to write, for `--dataset_name` of other commands")
    add("--splits", nargs="+", help="splits to convert; a file is one split, which gets this name")
    add("--media_dir", help="folder with the media files (default: the folder of the file)")
    add("--template", help="prompt template, with {question} and {choices}, {problem}, or {problem} and {options}")
    add("--skip_missing", action="store_true", default=None, help="drop rows without an audio file")
    add("--task", choices=("sft", "rl"), help="whole conversations, or prompts with a solution")
    add("--prompt_key", help="column of the problem")
    add("--answer_key", help="column of the answer")
    add("--contribution", choices=("weak", "strong"), help="keep rows with this label of AudioMCQ")
    add("--nframes", type=int, help="frames per video")
    add("--max_pixels", type=int, help="maximum pixels of an image or a frame")
    add("--total_pixels", type=int, help="maximum pixels of all frames of a video")
    _add_limits(parser)
