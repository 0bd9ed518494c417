# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of a command line before heavy imports."""

import argparse
import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..data.reading.rules import OPTION_NAMES, rules_of
from ..paths import local_path
from ..spelling import did_you_mean, recipe_names, split_settings
from ..trainers.batches import batch_options, batch_size, check_batches
from .options import NAME_OPTIONS, Value, config_path, options_of, read_config, table


# Device files of GPUs and other accelerators. By default, `accelerate launch` starts one process per accelerator.
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/dri/renderD*", "/dev/davinci[0-9]*", "/dev/accel*", "/dev/mlu*")


def check_run(command: str, args: argparse.Namespace) -> None:
    """Checks a launched command's required options, and its names of models, datasets, rewards and tools."""
    dataset = getattr(args, "dataset_name", None) or getattr(args, "datasets", None)
    reward_model = getattr(args, "reward_model_name_or_path", None) if getattr(args, "pairs", False) else None
    if not is_harness(getattr(args, "benchmark", None)):
        check_model_and_dataset(getattr(args, "model_name_or_path", None) or reward_model, dataset)
    if command == "filter" and getattr(args, "by", "contribution") == "contribution":
        check_ablated_modality(getattr(args, "ablate", None))
    check_names(args)
    check_batch(command, args)
    recipe = getattr(args, "reward_recipe", None)
    check_functions(getattr(args, "reward_funcs", None) or (() if recipe is None else recipe_names(recipe)))
    check_functions(getattr(args, "tools", None) or (), "tool")


def is_harness(benchmark: str | None) -> bool:
    """Returns whether another tool runs a benchmark, such as `lmms:mmstar`."""
    return ":" in (benchmark or "")


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
    config, dataset = getattr(args, "config", None), getattr(args, "dataset_name", None)
    if config is not None and dataset is not None and local_path(dataset) is None:
        text = re.sub(r" \\\n#\s+", " ", Path(config_path("recipes", config)).read_text(encoding="utf-8"))
        command = rf"^#\s+(trl-multimodal-rft prepare .*--output_dir {re.escape(dataset)}(?: .*)?)$"
        if match := re.search(command, text, re.MULTILINE):
            raise ValueError(f"There is no folder {dataset!r} with the rows of {config!r}; make it: {match[1]}")
    options = {name: value for name in OPTION_NAMES if (value := getattr(args, name, None)) is not None}
    rules_of(getattr(args, "media_rules", None), **options)


def check_functions(names: Sequence[str], kind: str = "reward function") -> None:
    """Checks the names of reward functions or tools; dotted paths are imported later."""
    built_in = table()["rewards" if kind == "reward function" else "tools"]
    for text in [names] if isinstance(names, str) else names:
        name, _ = split_settings(text)
        if "." not in name and name not in built_in:
            near = did_you_mean(name, built_in)
            raise ValueError(f"There is no {kind} {name!r}; name one of {built_in}, or a dotted path.{near}")


def check_batch(command: str, args: argparse.Namespace) -> None:
    """Checks that batches hold whole groups of completions. Passes if the number of processes is unknown."""
    defaults = {option["name"]: option["default"] for option in options_of(command)}
    processes = process_count(getattr(args, "launch", {}), getattr(args, "accelerate_config", None))
    if processes is None or "num_generations" not in defaults:
        return
    values = {"num_generations_eval": 1, **defaults, **vars(args), "world_size": processes, "do_eval": True}
    config = SimpleNamespace(**values)
    if (config.num_generations or 1) > 1:
        names, config.generation_batch_size = batch_options(config), batch_size(config)
        check_batches(config, names)


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
