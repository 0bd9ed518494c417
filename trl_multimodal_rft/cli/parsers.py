# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of the commands that run without `accelerate launch`. This module doesn't import the commands' code."""

import argparse
import os
from types import SimpleNamespace

from ..data.reading.rules import BUDGET_NAMES, OPTION_NAMES
from ..trainers.base.batch_sizes import batch_size
from .options import Parser, Value, config_path, options_of, parse_json, read_config
from .preflight import integer, process_count


# Names of the loaders, by layout
LAYOUTS = {
    "avqa": "load_avqa",
    "mmau": "load_mmau",
    "geometry3k": "load_geo3k",
    "avqa-r1": "load_avqa_r1",
    "easyr1": "load_easyr1",
    "verl": "load_verl",
    "speech": "load_speech",
    **dict.fromkeys(("rlaif-v", "mmpr"), "load_preferences"),
    **dict.fromkeys(("sharegpt", "llama-factory", "llava", "ms-swift"), "load_conversations"),
}
# For each strategy, whether it shards weights, whether it shards gradients, and whether it shards the optimizer state
SHARDS = {
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp2": (True, True, True),
}
# Bytes of optimizer state on the GPU, per byte of trained weights (True) or per trained weight (False)
OPTIMIZERS = {
    "adamw_torch_fused": (2, True),
    "adamw_torch": (2, True),
    "adamw_8bit": (2 + 2 * 4 / 256, False),  # two states of 1 byte, and their scales of 4 bytes per 256 weights
    "paged_adamw_8bit": (0, False),  # the state is in CPU memory
    "sgd": (0, False),
}
# Names of options that `check` and `estimate` share with launched commands, and of options that set a batch's size
_CHECK_OPTIONS = ("dataset_config", "dataset_streaming", "prompt", "solution", "system_prompt", "reward_funcs")
_CHECK_OPTIONS += (
    "trust_remote_code",
    "vllm_max_model_length",
    "audio_overlong",
    "ignored_media_columns",
    *OPTION_NAMES,
)
_ESTIMATE_OPTIONS = ("shared_trunk", "beta", "loss_view", "per_device_train_batch_size", "num_generations", "packing")
_ESTIMATE_OPTIONS += ("min_pixels", "max_pixels", "max_tokens_per_microbatch", "gradient_checkpointing", "freeze")
_ESTIMATE_OPTIONS += ("use_peft", "lora_r", "load_in_4bit", "use_vllm", "vllm_gpu_memory_utilization")
_ESTIMATE_OPTIONS += ("vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "offload_during_generation")
_ESTIMATE_OPTIONS += ("lora_modules_to_save",)
_BATCH_OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_BATCH_OPTIONS += ("generation_batch_size", "num_generations")
_RULES_HELP = "allowed sources and sizes of media, in JSON, as for a trainer's `media_rules`"
_CONFIG_HELP = "config file of a run, or name of a built-in recipe; options of other commands are ignored"


def chat(parser: Parser) -> None:
    add = parser.add_argument
    model_help = "folder of a trained model or adapter, or name on the Hub"
    model_group = parser.add_mutually_exclusive_group(required=True)
    model_group.add_argument("model_name_or_path", nargs="?", default=argparse.SUPPRESS, help=model_help)
    model_group.add_argument("--model_name_or_path", help=argparse.SUPPRESS)  # as in other commands
    add("--base", help="model to compare with (default: an adapter's base model, or none)")
    add("--system_prompt", help="system message (default: the one in the model card)")
    flag = "use_audio_in_video"  # without a value, so that it can precede the model's name
    parser.add_options("evaluate", "max_completion_length", "temperature", *(n for n in BUDGET_NAMES if n != flag))
    add(f"--{flag}", action="store_true", default=None, help="let the model hear the sound of videos")
    add("--trust_remote_code", action="store_true", help="run code that comes with a model")
    add("--dtype", default="auto", help="dtype of the weights, such as bfloat16; auto keeps the saved one")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 allows others on the network to connect")
    add("--port", type=int, help="port to listen on (default: the first free one from 7860)")


def check(parser: Parser) -> None:
    add = parser.add_argument
    add("--config", help=_CONFIG_HELP)
    add("--dataset_name", required=True, help="name on the Hub, file or folder (also one written by `save_to_disk`)")
    add("--dataset_split", default="train", help="split to check")
    add("--model_name_or_path", required=True, help="name on the Hub or folder with config and processor")
    rows_help = "rows of a generation batch, which the dataset must have"
    rows_default = "computed if `--config` sets `num_generations` and the number of processes is known, else 1"
    add("--batch_rows", type=int, default=1, help=f"{rows_help} (default: {rows_default})")
    length_default = "context length minus `--max_completion_length`"
    add("--max_prompt_length", type=int, help=f"maximum tokens of a prompt (default: {length_default})")
    parser.add_options("grpo", *_CHECK_OPTIONS, max_completion_length=256, model_revision=None)
    parser.add_options("dpo", "rejected_view", max_length=None)
    add("--media_rules", type=parse_json, help=_RULES_HELP)
    add("--chat_template_kwargs", type=parse_json, default={}, help="arguments of the chat template, as JSON")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--num_workers", type=int, default=cpus, help="worker processes that read and encode rows; 0 uses none")
    add("--output", help="Markdown file for the report")


def options_for_check(run_config: dict[str, Value]) -> dict[str, Value]:
    options = {"dataset_split": run_config["dataset_train_split"]} if "dataset_train_split" in run_config else {}
    config = run_config.get("accelerate_config")
    processes = process_count(run_config, None if config is None else str(config))
    if "num_generations" in run_config and processes is not None:
        sizes = {
            option["name"]: option["default"] for option in options_of("grpo") if option["name"] in _BATCH_OPTIONS
        }
        sizes |= {name: integer(name, run_config[name]) for name in _BATCH_OPTIONS if run_config.get(name) is not None}
        n_completions = batch_size(SimpleNamespace(**sizes, world_size=processes))
        options["batch_rows"] = n_completions // max(sizes["num_generations"], 1)
    return run_config | options


def compare(parser: Parser) -> None:
    add = parser.add_argument
    add("--model_name_or_path", "--model", required=True, help="name on the Hub or folder of a model")
    add("--dataset_name", required=True, help="name on the Hub, file or folder (also one written by `save_to_disk`)")
    add("--dataset_split", default="train", help="split with the rows")
    add(
        "--steps",
        type=int,
        default=3,
        help="steps of each trainer; more than one, to leave the first one's caches out",
    )
    plain_help = (
        "instead, compare updates of a run with the plain step of its method: grpo, rloo, sft, dpo, kto or reward"
    )
    add(
        "--plain",
        metavar="METHOD",
        help=f"{plain_help}. Other options are then those of the method, and `--steps` (2)",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    names = [
        name for name in _CHECK_OPTIONS if name not in ("dataset_streaming", "reward_funcs", "vllm_max_model_length")
    ]
    parser.add_options(
        "grpo",
        *names,
        "packing",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        learning_rate=0.01,
        gradient_checkpointing=False,
        model_revision=None,
    )
    add("--media_rules", type=parse_json, help=_RULES_HELP)
    add("--chat_template_kwargs", type=parse_json, default={}, help="arguments of the chat template, as JSON")
    parser.set_defaults(dataset_streaming=False)


def estimate(parser: Parser) -> None:
    add = parser.add_argument
    add("--config", help=_CONFIG_HELP)
    add("--model_name_or_path", required=True, help="name on the Hub, folder or config.json")
    add("--strategy", choices=[*SHARDS], default="single", help="sharding of weights, gradients and optimizer state")
    add("--gpus", type=int, default=1, help="number of GPUs")
    add("--gpu_memory", type=float, default=80, help="memory of each GPU in GiB")
    trainer_help = "trainer of the run; RLOO needs as much memory as GRPO"
    add("--trainer", choices=("grpo", "ppo", "sft"), default="grpo", help=trainer_help)
    add("--prompt_tokens", type=int, default=1152, help="minimum tokens of a prompt, media included")
    add("--completion_tokens", type=int, default=1024, help="tokens of a completion")
    add("--images", type=int, help="images per prompt (default: 1 if the model takes images)")
    add("--image_size", type=int, default=448, help="edge of the square images in pixels, before they are resized")
    audio_default = "30 if the model takes audio but no images, else 0"
    add("--audio_seconds", type=float, help=f"seconds of audio per prompt (default: {audio_default})")
    parser.add_options(
        "ppo", *_ESTIMATE_OPTIONS, bf16=True, steps_per_generation=1, lora_target_modules=["all-linear"]
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the loaded weights")
    add("--optim", choices=[*OPTIMIZERS], default="adamw_torch_fused", help="optimizer")
    add(
        "--vllm_mode",
        choices=("colocate", "server"),
        default="colocate",
        help="whether vLLM shares the GPUs of training, or has others",
    )
    add("--json", action="store_true", help="print one JSON object")


def options_for_estimate(run_config: dict[str, Value]) -> dict[str, Value]:
    launch = {
        **read_config(config_path("accelerate_configs", str(run_config.get("accelerate_config", "single_gpu")))),
        **run_config,
    }
    deepspeed = launch.get("deepspeed_config")
    parallelism = launch.get("parallelism_config")
    stage = deepspeed.get("zero_stage") if isinstance(deepspeed, dict) else None
    strategies = {"MULTI_GPU": "ddp", "FSDP": "fsdp2", "NO": "single"}
    config_keys = {  # key of the run config, by the option of `estimate` that it sets
        "gpus": "num_processes",
        "completion_tokens": "max_completion_length",
        "steps_per_generation": "gradient_accumulation_steps",  # TRL's default of the option
    }
    options = {option: launch[key] for option, key in config_keys.items() if key in launch}
    if isinstance(parallelism, dict):  # with replicas of sharded weights, `gpus` counts the GPUs of one replica
        shard_key = "parallelism_config_dp_shard_size"
        options["gpus"] = run_config.get(shard_key, parallelism.get(shard_key, 1))
    options |= {**run_config, "strategy": strategies.get(str(launch["distributed_type"]), f"zero{stage}")}
    if options.get("packing") not in ("prefix", "padded"):  # `packing` of supervised training is another option
        options.pop("packing", None)
    return options


def prepare(parser: Parser) -> None:
    add = parser.add_argument
    add("layout", choices=[*LAYOUTS], help="layout of the dataset")
    add("path", help="file or folder, or name of a dataset on the Hub")
    add("--output_dir", required=True, help="folder to write, for `--dataset_name` of other commands")
    add("--splits", nargs="+", help="splits to convert; for a file, the name of its only split")
    add("--media_dir", help="folder with the media files (default: the folder of the file)")
    fields = "{question} and {choices}; or {problem}; or {problem} and {options}"
    judge_fields = "{question}, {answer_a} and {answer_b}"
    template_help = f"prompt template. Its fields depend on the layout: {fields}. For a judge: {judge_fields}"
    add("--template", help=template_help)
    add("--skip_missing", action="store_true", default=None, help="drop rows whose audio file is missing")
    task_help = "sft: whole conversations; rl: prompts with a solution"
    task_help += "; dpo: pairs; kto: labelled completions; judge: pairs in both orders"
    add("--task", choices=("sft", "rl", "dpo", "kto", "judge"), help=task_help)
    add("--codec", help="codec that turns recordings into tokens, with the layout 'speech'")
    add("--prompt_key", help="column of the problem (default: problem), or of the text of a recording (text)")
    add("--answer_key", help="column of the answer (default: answer)")
    add("--max_pixels", type=int, help="maximum pixels of an image or a frame")
    add("--media_rules", type=parse_json, help=_RULES_HELP)
