# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Keyword arguments of trainers from the arguments of scripts, with loaded datasets and reward functions."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import ModelConfig, get_dataset, get_peft_config, get_quantization_config

from ..data.reading.decoding import require_module
from ..data.rows.load import load_dataset_arguments, load_rows, one_line_errors
from ..encoding.processors import load_processor
from ..paths import local_path
from ..rewards.named import DEFAULT_REWARDS
from ..trainers.base.argument_checks import mapping
from ..trainers.base.configs import TrainerConfig
from .arguments import PPOScriptArguments, PromptArguments, RFTScriptArguments, RLScriptArguments, ToolArguments
from .preflight import check_model_and_dataset
from .templates import with_system_message, with_texts


logger = get_logger(__name__)

_LAYER_NAME = re.compile(r"[\w.]+")  # of `lora_target_modules`, no pattern and not "all-linear"


def with_prompts(rows: Dataset | IterableDataset, script_args: PromptArguments) -> Dataset | IterableDataset:
    """Returns rows with the columns of the arguments' templates, and with their system message."""
    rows = with_texts(rows, {name: getattr(script_args, name, None) for name in ("prompt", "completion", "solution")})
    return with_system_message(rows, script_args.system_prompt)


def load_split(script_args: PromptArguments, split: str) -> Dataset | IterableDataset:
    """Returns a split of the dataset or mixture that the arguments name, with its prompts."""
    if script_args.datasets:
        if script_args.dataset_name is not None:
            logger.warning("`datasets` takes precedence, as in TRL; `dataset_name` is ignored.")
        rows = _mixture(script_args, split)
    else:
        rows = load_rows(
            str(script_args.dataset_name), script_args.dataset_config, split, script_args.dataset_streaming
        )
    return with_prompts(rows, script_args)


def _mixture(script_args: PromptArguments, split: str) -> Dataset | IterableDataset:
    # `get_dataset` passes the sources to `load_dataset`, which accepts neither the path of a file nor `~`
    sources = [
        source
        if source.data_files or source.data_dir
        else replace(source, **load_dataset_arguments(source.path, source.split))
        for source in script_args.datasets
    ]
    size = script_args.test_split_size
    with one_line_errors(f"the mixture of {', '.join(repr(source.path) for source in script_args.datasets)}"):
        splits = get_dataset(replace(script_args, datasets=sources, test_split_size=None))
    if size is not None:
        if script_args.streaming:
            raise ValueError("A stream can't be split; leave out `streaming` or `test_split_size`.")
        # TRL would split with a random seed, so that processes and resumed runs would have different splits
        splits = splits["train"].train_test_split(test_size=size, seed=0)
    if split not in splits:
        raise ValueError(f"`datasets` have no split {split!r}; set `test_split_size`, or leave evaluation out.")
    return splits[split]


def trainer_inputs(
    script_args: PromptArguments, training_args: TrainerConfig, model_args: ModelConfig
) -> dict[str, Any]:
    """Makes a trainer's keyword arguments from the arguments of a script."""
    check_model_and_dataset(model_args.model_name_or_path, script_args.dataset_name or script_args.datasets)
    options = mapping(training_args.model_init_kwargs)
    training_args.model_init_kwargs = model_init_kwargs(model_args) | options
    evaluates = training_args.eval_strategy != "no"
    if evaluates and not script_args.datasets:
        _check_separate_rows(script_args)
    inputs = {
        "model": model_args.model_name_or_path,
        "args": training_args,
        "train_dataset": load_split(script_args, script_args.dataset_train_split),
        "eval_dataset": load_split(script_args, script_args.dataset_test_split) if evaluates else None,
        **adapter_inputs(model_args),
    }
    if isinstance(script_args, RFTScriptArguments):
        reward_model = script_args.reward_model_name_or_path
        functions = script_args.load_rewards(DEFAULT_REWARDS if reward_model is None else [], takes_models=True)
        inputs["reward_funcs"] = functions if reward_model is None else [reward_model, *functions]
    if isinstance(script_args, RLScriptArguments) and script_args.chat_template_path is not None:
        source = str(model_args.model_name_or_path), model_args.model_revision, training_args.trust_remote_code
        inputs["processing_class"] = _with_chat_template(script_args.chat_template_path, *source)
    if isinstance(script_args, ToolArguments) and script_args.tools:
        inputs |= script_args.tool_inputs()
    if isinstance(script_args, PPOScriptArguments):
        inputs |= ppo_inputs(script_args)
    return inputs


def ppo_inputs(script_args: PPOScriptArguments) -> dict[str, Any]:
    """Returns the keyword arguments that only the PPO trainer has."""
    name = script_args.ptx_dataset_name
    config = script_args.ptx_dataset_config
    split = script_args.ptx_dataset_split
    return {
        "value_model": script_args.value_model_name_or_path,
        "ptx_dataset": None if name is None else load_rows(name, config, split, streaming=False),
    }


def _with_chat_template(
    path: str, name: str, revision: str | None, trust_remote_code: bool
) -> ProcessorMixin | PreTrainedTokenizerBase:
    file = Path(path).expanduser()
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    else:
        template = load_processor(path, None, trust_remote_code).chat_template
    if not isinstance(template, str):
        raise ValueError(
            f"`chat_template_path` is {path!r}, which has no chat template; name another model or a file."
        )
    processor = load_processor(name, revision, trust_remote_code)
    processor.chat_template = template
    return processor


def _check_separate_rows(script_args: PromptArguments) -> None:
    name = script_args.dataset_name
    splits = (script_args.dataset_train_split, script_args.dataset_test_split)
    path = None if name is None else local_path(name)
    if path is not None and path.is_file() and not any("[" in split for split in splits):
        raise ValueError(
            f"{name!r} is one split, so evaluation would use the training rows. Name a folder with files for train "
            "and test, or split the file: `--dataset_train_split 'train[:90%]' --dataset_test_split 'train[90%:]'`."
        )


def model_init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` among the arguments of the model."""
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }


def adapter_inputs(model_args: ModelConfig) -> dict[str, Any]:
    """
    Returns the arguments of a trainer for quantization and for an adapter, by default of all linear layers. One name
    in `lora_target_modules` ends layers' names, as each of several does; PEFT would take it for a whole name.
    """
    if model_args.use_peft:
        require_module("peft", "peft")
    targets = model_args.lora_target_modules
    if isinstance(targets, str) and _LAYER_NAME.fullmatch(targets):
        targets = [targets]
    if not targets and not model_args.lora_target_parameters:
        targets = "all-linear"
    config = get_peft_config(replace(model_args, lora_target_modules=None))
    if config is not None and targets:
        vars(config)["target_modules"] = targets if isinstance(targets, str) else {*targets}
    return {"quantization_config": get_quantization_config(model_args), "peft_config": config}
