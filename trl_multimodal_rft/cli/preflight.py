# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of a command line before heavy imports."""

import argparse
import ast
import glob
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..data.reading.rules import OPTION_NAMES, rules_of
from ..paths import check_not_overwritten, local_path, names_reward_model
from ..reporting.trackers import check_trackers
from ..spelling import check_dotted, read_json, recipe_names, split_settings, unknown_name_error
from ..trainers.base.batch_sizes import batch_options, batch_size, check_batches
from .options import NAME_OPTIONS, Value, config_path, options_of, read_config, table


# Device files of GPUs and other accelerators. By default, `accelerate launch` starts one process per accelerator.
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/dri/renderD*", "/dev/davinci[0-9]*", "/dev/accel*", "/dev/mlu*")
_ACCELERATORS += ("/dev/accel/accel*", "/dev/hl[0-9]*", "/dev/mtgpu*")


_MOST_NAMED = 5  # functions that an error about their module names


# Options that have no effect without another one, which an error names: a flag, or an option and its value
_NEEDED: dict[str, tuple[str, str | bool]] = {
    **dict.fromkeys(("use_rslora", "use_dora"), ("use_peft", True)),
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), ("load_in_4bit", True)),
    "eval_steps": ("eval_strategy", "steps"),
    **dict.fromkeys(("eval_delay", "eval_on_start", "num_generations_eval"), ("eval_strategy", "steps or epoch")),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), ("sync_ref_model", True)),
    **dict.fromkeys(("ptx_dataset_config", "ptx_dataset_split"), ("ptx_dataset_name", "NAME")),
    "reward_label_column": ("reward_recipe", "JSON"),
    "test_split_size": ("datasets", "JSON"),
    "greater_is_better": ("metric_for_best_model", "NAME"),
    **dict.fromkeys(("max_tool_calling_iterations", "max_tool_media"), ("tools", "NAME")),
    "lora_": ("use_peft", True),
    "vllm_": ("use_vllm", True),
}


def check_needed(command: str, args: argparse.Namespace) -> None:
    """
    Checks that options which the user set come with the option that they need. It may be set to off, as when a command
    line changes the options of a recipe.
    """
    options = {option["name"]: option["default"] for option in options_of(command)}
    for name in vars(args):
        prefix = name.partition("_")[0] + "_"
        needed, value = _NEEDED.get(name) or _NEEDED.get(prefix) or ("", "")
        if needed not in options or getattr(args, name) in (None, False):
            continue
        if name == "vllm_server_timeout" and command == "distillation":  # of a teacher's server, too
            continue
        setting = getattr(args, needed, options[needed])
        is_off = setting in (None, False, "no")
        is_fitting = str(setting) in str(value).split(" or ") or str(value).isupper()
        if hasattr(args, needed) if is_off else is_fitting or value is True:
            continue
        missing = f"`--{needed}`" if value is True else f"`--{needed} {value}`"
        raise ValueError(f"`--{name}` has no effect without {missing}; add it, or leave `--{name}` out.")


def check_sharding(args: argparse.Namespace) -> None:
    """Checks `--deepspeed`, which names a file of DeepSpeed, as users of other tools name a stage of ZeRO by it."""
    config = getattr(args, "deepspeed", None)
    stage = re.search(r"([123])(_offload)?(\.json)?\Z", config or "")
    if config is None or config.lstrip().startswith("{") or Path(config).is_file():
        return
    names = [f"deepspeed_zero{stage[1]}"] if stage else ["deepspeed_zero2", "deepspeed_zero3"]
    uses = " or ".join(f"`--accelerate_config {name}`" for name in names)
    raise ValueError(f"`--deepspeed` names the file of a DeepSpeed config, and {config!r} is none; use {uses}.")


def check_run(command: str, args: argparse.Namespace) -> None:
    """Checks a launched command's required options, and its names of models, datasets, rewards and tools."""
    dataset = getattr(args, "dataset_name", None) or getattr(args, "datasets", None)
    reward_model = getattr(args, "reward_model_name_or_path", None) if getattr(args, "pairs", False) else None
    check_model_and_dataset(getattr(args, "model_name_or_path", None) or reward_model, dataset)
    if command == "filter" and getattr(args, "by", "contribution") == "contribution":
        check_ablated_modality(getattr(args, "ablate", None))
    check_names(args)
    check_needed(command, args)
    check_sharding(args)
    check_batch(command, args)
    check_processes(args)
    if getattr(args, "max_steps", None) == 0:
        raise ValueError("`--max_steps 0` takes no step; set it above 0, or leave it out for `--num_train_epochs`.")
    if command not in ("evaluate", "filter"):
        check_trackers(getattr(args, "report_to", None))
    if command not in ("evaluate", "filter") and not getattr(args, "dry_run", False):
        for option in (*NAME_OPTIONS, "teacher_model_name_or_path"):
            if "model" in option:
                check_not_overwritten(getattr(args, "output_dir", None) or "", getattr(args, option, None))
    recipe = getattr(args, "reward_recipe", None)
    check_functions(getattr(args, "reward_funcs", None) or (() if recipe is None else recipe_names(recipe)))
    check_functions(getattr(args, "tools", None) or (), "tool")


def check_model_and_dataset(model: str | None, dataset: str | list | None) -> None:
    if model is None:
        raise ValueError("The run has no model; set `--model_name_or_path` to a name on the Hub or a folder.")
    if not dataset:
        raise ValueError("The run has no dataset; set `--dataset_name` to a name on the Hub, a folder or a file.")


def check_ablated_modality(ablate: str | None) -> None:
    if ablate is None:
        raise ValueError(
            "`--by contribution` needs the modality that answers depend on: set `--ablate` to audio, image or video, "
            "or set `--by accuracy`."
        )


def check_names(args: argparse.Namespace) -> None:
    """
    Checks that local models and datasets exist, and that rules of media such as `media_dir` are valid. If the dataset
    of a recipe is missing, the error shows the command that prepares it, from a comment in the recipe.
    """
    mixture_paths = [
        source.get("path") for source in getattr(args, "datasets", None) or () if isinstance(source, dict)
    ]
    for name in [*(getattr(args, option, None) for option in NAME_OPTIONS), *mixture_paths]:
        if isinstance(name, str):
            local_path(name)
    config = getattr(args, "config", None)
    dataset = getattr(args, "dataset_name", None)
    if config is not None and dataset is not None and local_path(dataset) is None:
        text = re.sub(r" \\\n#\s+", " ", Path(config_path("recipes", config)).read_text(encoding="utf-8"))
        command = rf"^#\s+(trl-multimodal-rft prepare .*--output_dir {re.escape(dataset)}(?: .*)?)$"
        match = re.search(command, text, re.MULTILINE)
        if match:
            raise ValueError(f"There is no folder {dataset!r} with the rows of {config!r}; make it: {match[1]}")
    options = {name: getattr(args, name, None) for name in OPTION_NAMES}
    given_options = {name: value for name, value in options.items() if value is not None}
    rules = getattr(args, "media_rules", None)
    rules_of(read_json(rules) if isinstance(rules, str) and rules.lstrip().startswith("{") else rules, **given_options)


def check_functions(names: Sequence[str], kind: str = "reward function") -> None:
    """Checks the names of reward functions or tools. Modules of dotted paths are imported later."""
    built_in = table()["rewards" if kind == "reward function" else "tools"]
    if isinstance(names, str):
        names = [names]
    is_reward = kind == "reward function"
    for text in names:
        if is_reward and names_reward_model(text):
            local_path(text)
            continue
        name, settings = split_settings(text)
        module = Path(name.removesuffix(".py").replace(".", "/"))
        file = next((path for path in (module.with_suffix(".py"), module / "__init__.py") if path.is_file()), None)
        if settings is None and "," in name:
            raise ValueError(f"{text!r} are several names; separate them by spaces: `{text.replace(',', ' ')}`.")
        if re.fullmatch(r"[\w.]+:\w+", name):
            raise ValueError(f"There is no {kind} {name!r}; write a dot: `{name.replace(':', '.')}`.")
        package = module.parent / "__init__.py"  # which may give the name of a module to a function in it
        is_imported = package.is_file() and re.search(rf"import.*\b{module.name}\b", package.read_text("utf-8"))
        if file is not None and name not in built_in and not is_imported:
            path = name.removesuffix(".py")
            defined = [f"`{path}.{function}`" for function in _functions_in(file)]
            raise ValueError(
                f"{name!r} is a module, not a {kind}; name a function in it: "
                f"{' or '.join(defined[:_MOST_NAMED]) or f'`{path}.NAME`'}."
            )
        if "." in name:
            check_dotted(name, kind)
        elif name not in built_in:
            folders = [path.parent.name for path in Path().glob("*/config.json")] if is_reward else []
            another = ", or the folder of a reward model" if is_reward else ""
            raise unknown_name_error(
                kind, name, [*built_in, *folders], f"a dotted path such as `my_{kind.split()[0]}s.NAME`{another}"
            )


def _functions_in(file: Path) -> list[str]:
    """Returns the names of the public functions that a file of Python defines, without importing it."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return []
    functions = (node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [name for name in functions if not name.startswith("_")]


def check_batch(command: str, args: argparse.Namespace) -> None:
    """Checks that batches hold whole groups of completions. Passes if the number of processes is unknown."""
    defaults = {option["name"]: option["default"] for option in options_of(command)}
    processes = process_count(getattr(args, "launch", {}), getattr(args, "accelerate_config", None))
    if processes is None or "num_generations" not in defaults:
        return
    values = {"num_generations_eval": 1, **defaults, **vars(args), "world_size": processes, "do_eval": True}
    config = SimpleNamespace(**values)
    if (config.num_generations or 1) > 1:
        names = batch_options(config)
        config.generation_batch_size = batch_size(config)
        check_batches(config, names)


def check_processes(args: argparse.Namespace) -> None:
    """Checks that this machine has a device for each process that `accelerate launch` is to start on it."""
    launch = getattr(args, "launch", {})
    config = getattr(args, "accelerate_config", None)
    count = process_count(launch, config)
    if count is None or count <= 1:
        return
    options = {} if config is None else read_config(config_path("accelerate_configs", config))
    options |= launch
    machines = integer("num_machines", options.get("num_machines") or 1)
    if str(options.get("distributed_type")) == "NO":
        raise ValueError(
            f"`--num_processes` is {count}, but {config!r} has `distributed_type: 'NO'`, which starts one; use "
            "`--accelerate_config multi_gpu`, or leave it out."
        )
    settings = options.get("cpu"), options.get("use_cpu"), getattr(args, "use_cpu", None)
    is_cpu = "true" in {str(value).lower() for value in (*settings, os.environ.get("ACCELERATE_USE_CPU"))}
    devices = device_count()
    if is_cpu or "config_file" in options or devices is None or math.ceil(count / machines) <= devices:
        return
    on_cpu = "on the CPU, use `--accelerate_config multi_gpu`, and set `ACCELERATE_USE_CPU=true` in the environment"
    remedy = f"set it to {devices}" if devices else f"leave it out, or, {on_cpu}"
    raise ValueError(
        f"`--num_processes` is {count}, but this machine has {devices or 'no'} accelerator{'s' * (devices != 1)} to "
        f"use; {remedy}."
    )


def device_count() -> int | None:
    """Returns the number of accelerators that processes may use here, `None` if it can't be told without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = max(len(glob.glob(files)) for files in _ACCELERATORS)
    if glob.glob("/dev/dxg") or sys.platform != "linux":
        return None
    return count if visible is None or not count else min(count, len([name for name in visible.split(",") if name]))


def process_count(launch: Mapping[str, Any], config: str | None) -> int | None:
    """
    Returns the number of processes that `accelerate launch` starts with the options `launch` and an accelerate
    `config`. `None` means that the number depends on the user's default config, or on the number of GPUs.
    """
    count = launch.get("num_processes")
    if count is None and config is not None:
        count = read_config(config_path("accelerate_configs", config)).get("num_processes")
    if count is not None:
        return integer("num_processes", count)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = os.path.expanduser(os.environ.get("HF_HOME", f"{cache}/huggingface"))
    if "config_file" in launch or config is not None or glob.glob(f"{folder}/accelerate/default_config.*"):
        return None
    return 1 if max(len(glob.glob(files)) for files in _ACCELERATORS) <= 1 else None


def integer(name: str, value: Value) -> int:
    """Returns an option of a config file as an integer. Raises a `ValueError` that names the option."""
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"`{name}` is {value!r}, which isn't an integer; write a whole number.") from None
