# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of the names, types and ranges of TRL's and this package's arguments."""

import functools
import inspect
import logging
import math
import os
import re
import tempfile
import typing
from collections.abc import Generator, Sequence
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from accelerate import ParallelismConfig
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import TrainingArguments

from ...credentials import without_credentials
from ...paths import check_not_overwritten
from ...spelling import check_value, did_you_mean, read_json


if TYPE_CHECKING:
    from .signatures import Model


logger = get_logger(__name__)

# Valid intervals of TRL's and transformers' arguments. This package's arguments have their intervals in annotations
_NAMES_BY_INTERVAL = {
    "[0, inf]": (
        "adam_epsilon dataloader_num_workers dataset_num_proc epsilon epsilon_high off_policy_mask_threshold "
        "router_aux_loss_coef vllm_importance_sampling_clip_min weight_decay"
    ),
    "(-inf, inf)": (
        "data_seed entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target "
        "f_alpha_divergence_coef"
    ),
    "[0, inf)": (
        "beta center_rewards_coefficient desirable_weight learning_rate neftune_noise_alpha num_train_epochs "
        "undesirable_weight vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos warmup_steps"
    ),
    "(0, inf]": "delta sapo_temperature_neg sapo_temperature_pos vllm_importance_sampling_clip_max",
    "(0, inf)": "discopop_tau repetition_penalty temperature",
    "[1, inf]": (
        "eval_accumulation_steps generation_batch_size gradient_accumulation_steps max_completion_length "
        "num_generations_eval num_iterations per_device_eval_batch_size per_device_train_batch_size "
        "precompute_ref_batch_size ref_model_sync_steps steps_per_generation vllm_max_model_length "
        "vllm_tensor_parallel_size"
    ),
    "[-1, inf]": "top_k",
    "[0, 1]": "label_smoothing ld_alpha min_p ref_model_mixup_alpha",
    "[0, 1)": "adam_beta1 adam_beta2",
    "(0, 1]": "top_entropy_quantile top_p vllm_gpu_memory_utilization",
}
# Choices of TRL's and transformers' arguments whose annotations lack them
_LOG_LEVELS = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
_CHOICES = {
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "packing_strategy": Literal["bfd", "bfd_split", "wrapped"],
    "scale_rewards": Literal["group", "batch", "none", True, False],
    "train_sampling_strategy": Literal["random", "sequential", "group_by_length"],
    "truncation_mode": Literal["keep_start", "keep_end"],
    "vllm_mode": Literal["server", "colocate"],
}
_INTERVALS: dict[str, str] = {}
for _interval, _names in _NAMES_BY_INTERVAL.items():
    _INTERVALS |= dict.fromkeys(_names.split(), _interval)
_NONE_ALLOWED = ("top_k", "top_p")  # `None` is valid for these, even where TRL's annotations lack it

# Options with a dictionary in JSON whose other texts are the path of a file, or have an error of their own
_OTHER_TEXTS = ("accelerator_config", "deepspeed", "fsdp_config", "learning_rates")

# Remedies in error messages. For all other arguments, the remedy is the default value
_REMEDIES = {
    "temperature": "set a low temperature such as 0.1, since completions of a prompt must differ; `trl-multimodal-rft "
    "evaluate` decodes greedily",
    "top_entropy_quantile": "1 trains on all tokens",
    "top_k": "0 samples from all tokens",
    "top_p": "1 samples from all tokens",
}


# A table of conditions of which none may be true, and messages about them
Conflicts = Sequence[tuple[bool, str]]


def raise_first(conflicts: Conflicts) -> None:
    """Raises a `ValueError` with the message of the first condition that is true."""
    for is_true, message in conflicts:
        if is_true:
            raise ValueError(message)


def help_from_docstring(config_class: type) -> type:
    """Fills in the missing help texts of a config's fields from its docstring, and returns the class."""
    text = inspect.cleandoc(config_class.__doc__ or "")
    # Pairs of a parameter's name and its description, the lines below `name (type):` that are indented further
    descriptions = dict(re.findall(r"^    (\w+) \(.*\):\n((?:        .*\n?)+)", text, re.MULTILINE))
    for option in fields(config_class):
        if option.name in descriptions and "help" not in option.metadata:
            description = " ".join(descriptions[option.name].split())
            # Replaces links by their texts, and keeps the brackets of lists
            description = re.sub(r"\[([^\]]*)\]\([^)]*\)|\[(`~?[\w.]+`)\]", r"\1\2", description)
            description = description.replace("`~", "`").replace("$\\lambda$", "lambda")
            option.metadata = MappingProxyType({**option.metadata, "help": description})
    return config_class


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


def as_names(value: str | list[str] | None) -> list[str] | None:
    """Returns the distinct names in comma-separated text, or in a list of such texts, or `None` if there are none."""
    texts = [value] if isinstance(value, str) else value or []
    names = [name.strip() for name in ",".join(texts).split(",")]
    return list(dict.fromkeys(filter(None, names))) or None


def check_dtype(option: str, kwargs: dict[str, Any] | None) -> None:
    """Raises a `ValueError` if the `dtype` in `kwargs`, the arguments of `from_pretrained`, isn't a dtype of torch."""
    dtype = (kwargs or {}).get("dtype", "auto")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        full_name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}.get(dtype.lower())
        remedy = f"Did you mean '{full_name}'?" if full_name else "Write 'float32', 'bfloat16', 'float16' or 'auto'."
        raise ValueError(f"`{option}` has the dtype {dtype!r}, which torch doesn't have. {remedy}")


def check_json(config: TrainingArguments, names: Sequence[str]) -> None:
    """
    Raises a `ValueError` if one of a config's dictionaries is of another type, or a text that isn't JSON, see
    [`~spelling.read_json`]. transformers would keep a text that doesn't start with a brace, and its error for other
    texts doesn't name the option. Strips whitespace around JSON.

    Args:
        config ([`~transformers.TrainingArguments`]): Config, changed in place.
        names (`Sequence[str]`): Options that take dictionaries.
    """
    for name in names:
        text = getattr(config, name)
        if not isinstance(text, (str, dict, NoneType)) and name not in _OTHER_TEXTS:
            raise ValueError(f"`{name}` must be a dictionary, got {text!r:.60}; correct or remove it.")
        if not isinstance(text, str) or not text.strip() or (name in _OTHER_TEXTS and not text.startswith("{")):
            continue
        try:
            problem = "" if isinstance(read_json(text), dict) else "it is no dictionary"
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ValueError(
                f"`{name}` must be a dictionary, in JSON such as '{{\"option\": 1}}', got the text "
                f"{without_credentials(text)!r} ({without_credentials(problem)}); correct or remove it."
            )
        setattr(config, name, text.strip())  # transformers looks for the brace at the start


def as_rates(value: Any) -> dict[str, float] | None:
    """Returns `learning_rates` with texts such as YAML's "2e-6" converted to numbers, or `None` if it is empty."""
    if not value:
        return None
    try:
        rates = {str(key): math.nan if isinstance(rate, bool) else float(rate) for key, rate in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"`learning_rates` must be a dictionary of numbers, such as {{'vision_tower': 2e-6}}, got {value!r}."
        ) from None
    for key, rate in rates.items():
        if not 0 < rate < math.inf:
            raise ValueError(f"`learning_rates[{key!r}]` must be above 0, got {rate}; `freeze` keeps a part as it is.")
    return rates


def check_padding(multiple: int | str | None) -> None:
    """
    Raises a `ValueError` if `pad_to_multiple_of` is neither "auto" nor `None` nor a whole number above 0. Commands
    pass the last two as texts.
    """
    text = str(multiple).lower()
    is_number = text.isdecimal() and int(text) > 0
    if not is_number and text not in ("auto", "none", "null"):
        raise ValueError(
            f"`pad_to_multiple_of` must be a whole number above 0, 'auto' or `None`, got {multiple!r}; 'auto' pads to "
            "the longest row on all devices but those of Neuron."
        )


class Needs:
    """Annotation of a config's field that has no effect unless one of the named options is set, or has its value."""

    def __init__(self, *names: str, **values: str):
        self.names = names
        self.values = values

    def check(self, option: str, config: object) -> None:
        """Raises a `ValueError` if a config sets none of the named options."""
        has_value = any(getattr(config, name) == value for name, value in self.values.items())
        if not has_value and not any(getattr(config, name) for name in self.names):
            spellings = [*self.names, *(f"{name}={value!r}" for name, value in self.values.items())]
            names = " or ".join(f"`{spelling}`" for spelling in spellings)
            raise ValueError(f"`{option}` has no effect without {names}; set {names} or remove it.")


def check_values(config, values: dict[str, Any] | None = None, label: str = "{}") -> None:
    """
    Checks the types and ranges of a config's fields, or of `values`, which are other values for some of the fields.
    `label` formats the names of fields in messages. Also raises an error if a field has no effect without other
    options, see [`Needs`].
    """
    values = vars(config) if values is None else values
    annotations = _annotations(type(config))
    for option in fields(config):
        if option.name not in values or values[option.name] is None and option.name in _NONE_ALLOWED:
            continue
        annotation = annotations[option.name]
        remedy = f"the default is {option.default}"
        # `_REMEDIES` has values within `_INTERVALS`, which a config with another interval may exclude
        if _INTERVALS.get(option.name) in getattr(annotation, "__metadata__", ()):
            remedy = _REMEDIES.get(option.name, remedy)
        check_value(f"`{label.format(option.name)}`", values[option.name], annotation, remedy)
        for constraint in getattr(annotation, "__metadata__", ()):
            if isinstance(constraint, Needs) and values[option.name] != option.default:
                constraint.check(option.name, config)


@functools.cache
def _annotations(config_class: type) -> dict[str, Any]:
    """Adds the intervals and choices of TRL's and transformers' arguments."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    hints |= {name: choices for name, choices in _CHOICES.items() if name in hints}
    names_without_interval = {
        name for name, hint in hints.items() if name in _INTERVALS and typing.get_origin(hint) is not Annotated
    }
    return {
        name: Annotated[hint, _INTERVALS[name]] if name in names_without_interval else hint
        for name, hint in hints.items()
    }


def warn_of_rates(config: TrainingArguments) -> None:
    """Warns of a run without steps, and of a learning rate that no model survives."""
    # Accelerate's logger needs its state, which doesn't exist yet
    plain_logger = logging.getLogger(__name__)
    if config.num_train_epochs == 0 and config.max_steps <= 0:
        plain_logger.warning("`num_train_epochs=0` trains nothing; set it above 0, or set `max_steps`.")
    if config.learning_rate > 1:
        plain_logger.warning(
            f"`learning_rate={config.learning_rate:g}` is far above any that trains a model; write 1e-6 for 0.000001."
        )


# Options that concern speed alone and have no effect, with their neutral values, and what happens here instead
_SPEED_OPTIONS = {
    "dataloader_in_order": ((True,), "rows always come in the order of the sampler"),
    "dataloader_multiprocessing_context": ((None, "fork"), "processes that read rows ahead are forked"),
    "dataloader_persistent_workers": ((False,), "processes that read rows ahead live as long as the run, or an epoch"),
    "dataloader_prefetch_factor": ((None,), "`media_prefetch` says how many batches are read ahead"),
    "use_liger_kernel": (
        (False,),
        "the forward of this package scores packed rows; to fuse operations of layers, set `torch_compile=True`",
    ),
}


def warn_of_speed_options(config: TrainingArguments) -> None:
    """Warns of options of speed that have no effect, and sets them to their neutral values."""
    for name, (neutral, reason) in _SPEED_OPTIONS.items():
        value = getattr(config, name, neutral[0])  # versions of transformers differ in their options
        if value not in neutral:
            setattr(config, name, neutral[0])
            # Accelerate's logger needs its state, which doesn't exist yet
            logging.getLogger(__name__).warning(f"`{name}={value!r}` has no effect here: {reason}.")


def check_generation_kwargs(config, names: set[str] | None) -> None:
    """Raises a `ValueError` if `generation_kwargs` has a name outside `names` (unless `None`) or an invalid value."""
    options = config.generation_kwargs or {}
    for name in options:
        if names is not None and name not in names:
            raise ValueError(
                f"`generation_kwargs` has {name!r}, which is no option of `transformers.GenerationConfig`; correct or "
                f"remove it.{did_you_mean(name, names)}"
            )
    check_values(config, options, "generation_kwargs[{!r}]")


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
        kwargs = args.model_init_kwargs or {}
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


# Options of TRL about speed and the layout of batches, which change no result. The trainers on datasets with
# completions (SFT, DPO, KTO, reward models) don't use them, and warn of values that aren't neutral
LAYOUT_OPTIONS = {
    "dataset_num_proc": (
        (None,),
        "rows are encoded when they are read; to use more processes, raise `dataloader_num_workers`",
    ),
    "pad_to_multiple_of": ((None, "auto"), "rows are padded only to the longest row of a batch"),
    "padding_free": ((False,), "`packing` lays rows out without padding"),
    "include_num_input_tokens_seen": (("no", False), "the metric `num_tokens` counts them"),
}

# Further options that these trainers don't use, with their neutral values, and the reason why other values raise an
# error
UNUSED_OPTIONS = {
    "train_sampling_strategy": (
        ("random", "sequential"),
        "lengths aren't known before rows are read; to bound the tokens of a forward, set `max_tokens_per_microbatch`",
    ),
}

# As `UNUSED_OPTIONS`, of the trainers that sample completions
UNUSED_IN_SAMPLING = {
    "train_sampling_strategy": (
        ("random",),
        "`shuffle_dataset` says whether rows are shuffled, and lengths aren't known before completions are sampled",
    ),
    "neftune_noise_alpha": (
        (None,),
        "completions would be sampled by another policy than the one whose log-probabilities are trained",
    ),
}


def check_unused(
    args: TrainingArguments,
    options: dict[str, tuple[tuple, str]],
    method: str,
    layout_options: dict[str, tuple[tuple, str]] = LAYOUT_OPTIONS,
) -> None:
    """
    Raises a `ValueError` for options that the method doesn't use, unless they have a neutral value. Only warns of
    `layout_options`, and sets them to their neutral value.
    """
    for name, (neutral, reason) in layout_options.items():
        value = getattr(args, name, neutral[0])
        if value not in neutral:
            setattr(args, name, neutral[0])
            logger.warning_once(f"`{name}={value!r}` has no effect in {method} here: {reason}.")
    for name, (neutral, reason) in options.items():
        if getattr(args, name, neutral[0]) not in neutral:  # not every config has every option
            raise ValueError(
                f"`{name}={getattr(args, name)!r}` has no effect in {method} here, so remove it: {reason}."
            )


def check_noise(args: TrainingArguments, packs: bool | None, remedy: str) -> None:
    """Raises a `ValueError` for `neftune_noise_alpha` with packed rows."""
    if args.neftune_noise_alpha is not None and packs:
        raise ValueError(
            "The noise of `neftune_noise_alpha` depends on the length of a row, which isn't known in packed rows; "
            f"{remedy}, or remove it."
        )


def mapping(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """Returns the value of an option that commands read from JSON, or an empty `dict` if the option isn't set."""
    return option if isinstance(option, dict) else {}
