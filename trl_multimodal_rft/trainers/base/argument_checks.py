# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of the names, types and ranges of TRL's and this package's arguments."""

import inspect
import os
import tempfile
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import TrainingArguments

from ...credentials import revealed
from ...paths import check_not_overwritten
from ...spelling import did_you_mean


if TYPE_CHECKING:
    from .signatures import Model


# Remedies for keyword arguments that these trainers don't have
_KEYWORD_REMEDIES = {
    "compute_metrics": " Measure completions by `trainer.add_callback(GenerationEvalCallback(trainer))`.",
    "data_collator": " The trainer encodes and joins the rows itself.",
}


def check_keywords(cls: type, kwargs: dict[str, Any]) -> None:
    """Raises a `TypeError` for an unknown keyword argument of a constructor, with the remedy or a similar name."""
    parameters = inspect.signature(cls.__init__).parameters
    unknown = kwargs.keys() - parameters.keys()
    # A constructor with `**kwargs` may accept any keyword
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        name = min(unknown)
        message = f"{cls.__name__} got an unexpected keyword argument '{name}'."
        if name == "compute_metrics" and "reward_funcs" not in parameters:  # the remedy needs a trainer that samples
            raise TypeError(message)
        raise TypeError(message + _KEYWORD_REMEDIES.get(name, did_you_mean(name, parameters)))


class CheckedKeywords:
    """Base class that checks the keywords of its constructor, see [`check_keywords`], and keeps their names."""

    passed = frozenset()  # names of the keywords

    def __new__(cls, *args, **kwargs):
        check_keywords(cls, kwargs)
        instance = super().__new__(cls)
        instance.passed = frozenset(kwargs)
        return instance


def check_instances(**arguments: Any) -> None:
    """Raises a `TypeError` if an argument is a class in place of an instance."""
    for name, value in arguments.items():
        if isinstance(value, type):
            call = value.__name__ + (".from_pretrained(...)" if hasattr(value, "from_pretrained") else "(...)")
            raise TypeError(f"`{name}` is the class {value.__name__}; pass an instance, such as `{call}`.")


def check_parallelism(args: Any, model: "Model") -> None:
    """
    Raises a `ValueError` for tensor, context or sequence parallelism, in which several ranks must read the same rows.
    These trainers read different rows on each rank.
    """
    parallelism = args.parallelism_config or ParallelismConfig()  # defaults to `accelerate launch`'s settings
    # accelerate has `sp_size` since 1.12
    sizes = {name: getattr(parallelism, name, None) for name in ("tp_size", "cp_size", "sp_size")}
    deepspeed = {} if args.deepspeed_plugin is None else args.deepspeed_plugin.deepspeed_config
    sizes["autotp_size"] = deepspeed.get("tensor_parallel", {}).get("autotp_size")
    sizes["sequence_parallel_size"] = deepspeed.get("sequence_parallel_size")
    # Options that split layers or tokens, and their values
    splits = {name: size for name, size in sizes.items() if (size or 1) > 1}
    if isinstance(model, str):
        kwargs = mapping(args.model_init_kwargs)
        splits |= {name: kwargs[name] for name in ("tp_plan", "tp_size", "distributed_config") if kwargs.get(name)}
    else:
        model_sizes = {name: getattr(model, name, None) or 1 for name in ("tp_size", "fsdp_size")}
        splits |= {f"model.{name}": size for name, size in model_sizes.items() if size > 1}
    if splits:
        raise ValueError(
            f"{', '.join(f'`{name}={value!r}`' for name, value in splits.items())}: ranks that share a model's layers "
            "or a row's tokens would train on different rows. Remove it. To split weights, use `fsdp2.yaml`, "
            "`hsdp.yaml` or `deepspeed_zero3.yaml`; to split micro-batches, set `max_tokens_per_microbatch`."
        )


def check_arguments(reward_funcs: Any = None, args: Any = None, **arguments: Any) -> None:
    """Raises an error if a trainer's arguments have wrong types, or contradict its config."""
    names = ("processing_class", "ref_model", "value_model", "peft_config", "quantization_config")
    check_instances(**{name: arguments.get(name) for name in names})
    reference = arguments.get("ref_model")
    if not isinstance(reference, (torch.nn.Module, type(None))):
        remedy = "pass a loaded model, or leave it out for a reference like the model to train"
        remedy = "pass it as `args`" if isinstance(reference, TrainingArguments) else remedy
        raise TypeError(f"`ref_model` is of type {type(reference).__name__}; {remedy}.")
    collator = arguments.get("data_collator")
    if collator is not None:
        raise TypeError(
            f"`data_collator` is of type {type(collator).__name__}, but the trainer encodes and joins the rows "
            "itself; pass None, or leave it out."
        )
    for name in ("train_dataset", "ptx_dataset"):
        _check_dataset(name, arguments.get(name))
    eval_dataset = arguments.get("eval_dataset")
    datasets_by_key = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}
    for key, dataset in datasets_by_key.items():
        _check_dataset("eval_dataset" if key is None else f"eval_dataset[{key!r}]", dataset)
    reward_list = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for index, reward_func in enumerate(reward_list if reward_funcs is not None else ()):
        name = f"reward_funcs[{index}]" if isinstance(reward_funcs, list) else "reward_funcs"
        check_instances(**{name: reward_func})
        if not isinstance(reward_func, str) and not callable(reward_func):
            raise TypeError(
                f"`{name}` is of type {type(reward_func).__name__}; pass a function, a model, or the name of a reward "
                "model."
            )
    if getattr(args, "max_staleness", 0) > 0:
        for name in ("environment_factory", "rollout_func"):
            if arguments.get(name):
                raise ValueError(
                    f"`max_staleness` sends prompts to servers early, but `{name}` makes prompts only when they are "
                    "sampled; remove one of them."
                )
        if isinstance(arguments.get("train_dataset"), IterableDataset):
            raise ValueError(
                "`max_staleness` reads rows ahead, and again when a run resumes, which an iterable dataset doesn't "
                "allow; pass a `Dataset`."
            )
    tool_source = arguments.get("tools") or arguments.get("environment_factory")
    for option in ("max_context_media", "max_tool_media"):
        if not tool_source and getattr(args, option, None) is not None:
            raise ValueError(f"`{option}` has no effect without `tools` or `environment_factory`; pass one of them.")
    for option in ("rollout_view", "contrast_view"):
        for name in ("tools", "environment_factory", "rollout_func"):
            if arguments.get(name) and getattr(args, option, None) is not None:
                raise ValueError(
                    f"`{option}` samples completions from a view of the media, but `{name}` samples or continues "
                    "completions with the original media; remove one of them."
                )


def _check_dataset(name: str, dataset: Any) -> None:
    check_instances(**{name: dataset})
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows; add rows, or leave it out.")
    if dataset is None or isinstance(dataset, (Dataset, IterableDataset)):
        return
    kind = type(dataset).__name__
    remedy = "`Dataset.from_list(list(rows))`"
    if isinstance(dataset, (DatasetDict, IterableDatasetDict, dict)):
        splits = list(dataset)
        has_columns = not all(isinstance(value, (Dataset, IterableDataset)) for value in dataset.values())
        kind = f"{kind} with the splits {', '.join(map(repr, splits))}"
        remedy = "one of them"
        remedy += f", such as `dataset[{splits[0]!r}]`" if splits else ""
        if has_columns and "train" not in dataset:
            kind = "dict of columns"
            remedy = "`Dataset.from_dict(columns)`"
    elif isinstance(dataset, (torch.utils.data.Dataset, Generator)):
        remedy = "`Dataset.from_generator(rows)` with a function that yields the rows"
    remedies = {"str": f"`{name}=load_dataset(...)`", "DataFrame": "`Dataset.from_pandas(frame)`"}
    problem = f"`{name}` must be a `Dataset` or `IterableDataset`, got a"
    raise TypeError(f"{problem} {kind}; pass {remedies.get(kind, remedy)}.")


def check_output_dir(folder: str, model: str | None = None) -> None:
    """
    Raises `OSError` if an output folder can't be made or written to, and `ValueError` if it is the model's folder.
    Makes no folder.
    """
    check_not_overwritten(folder, model)
    path = os.path.abspath(folder)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise OSError(
            f"`output_dir={folder!r}` can't be written to ({error.strerror}); name another folder, or allow writing "
            "there."
        ) from error


def mapping(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """
    Returns the value of an option that commands read from JSON, with its secrets, or an empty `dict` if the option
    isn't set.
    """
    return revealed(option) if isinstance(option, dict) else {}
