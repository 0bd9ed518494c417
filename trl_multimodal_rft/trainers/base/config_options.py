# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The table of a config's options: default, type, choices, interval, the options that one needs, and values that have no
effect. Configs check their values by it, and the commands and LightRFT's options read it. What options exclude
each other stands in `conflicts.py`.
"""

import functools
import inspect
import logging
import math
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import torch
from transformers import SchedulerType, TrainingArguments

from ...credentials import without_credentials
from ...spelling import check_value, did_you_mean, interval_of, read_json


# Not accelerate's, which needs its state, and that doesn't exist yet
logger = logging.getLogger(__name__)

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
_INTERVALS: dict[str, str] = {}
for _interval, _names in _NAMES_BY_INTERVAL.items():
    _INTERVALS |= dict.fromkeys(_names.split(), _interval)
_NONE_ALLOWED = ("top_k", "top_p")  # `None` is valid for these, even where TRL's annotations lack it

# Options with a dictionary in JSON whose other texts are the path of a file, or have an error of their own
_OTHER_TEXTS = ("accelerator_config", "deepspeed", "fsdp_config", "learning_rates")

# Remedies in error messages, by option and interval. For all others, the remedy is the default value
_REMEDIES: dict[tuple[str, str | None], str] = {
    ("temperature", "(0, inf)"): "set a low temperature such as 0.1, since completions of a prompt must differ; "
    "`trl-multimodal-rft evaluate` decodes greedily",
    ("temperature", "[0, inf)"): "0 decodes greedily",
    ("top_entropy_quantile", "(0, 1]"): "1 trains on all tokens",
    ("top_k", "[-1, inf]"): "0 samples from all tokens",
    ("top_p", "(0, 1]"): "1 samples from all tokens",
}


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


class Ascending:
    """Annotation of a config's field that is `None`, or a smallest value followed by a larger one."""

    def check(self, option: str, config: object) -> None:
        """Raises a `ValueError` for other values."""
        bounds = getattr(config, option)
        if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):  # NaN isn't below anything
            raise ValueError(f"`{option}` must be (min, max) with min < max, got {tuple(bounds)}.")


class Unused(NamedTuple):
    """Why an option has no effect, the values that are neutral all the same, and whether others raise an error."""

    neutral: tuple
    reason: str
    is_error: bool = True


# Annotations of TRL's and transformers' arguments, whose own lack choices or conditions
_LOG_LEVELS = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
_ANNOTATIONS: dict[str, Any] = {
    "importance_sampling_level": Literal["token", "sequence"],
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "packing_strategy": Literal["bfd", "bfd_split", "wrapped"],
    "scale_rewards": Literal["group", "batch", "none", True, False],
    "train_sampling_strategy": Literal["random", "sequential", "group_by_length"],
    "truncation_mode": Literal["keep_start", "keep_end"],
    "value_lr_scheduler_type": Literal[tuple(schedule.value for schedule in SchedulerType)] | None,  # pyrefly: ignore[invalid-literal]
    "vllm_mode": Literal["server", "colocate"],
}


# Conditions of TRL's arguments
_CONDITIONS = {"reward_clip_range": Ascending()}


@dataclass(frozen=True)
class Option:
    """An option of a config: a row of its table."""

    name: str
    default: Any
    annotation: Any  # with the interval, and the conditions of its values
    unused: Unused | None  # `None` for an option that has an effect

    @property
    def interval(self) -> str | None:
        """The interval of valid numbers, such as `"[0, 1)"`."""
        return interval_of(self.annotation)

    @property
    def choices(self) -> tuple | None:
        """All valid values, if they are listed."""
        annotation = self.annotation
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        for alternative in (annotation, *get_args(annotation)):
            if get_origin(alternative) is Literal:
                return get_args(alternative)
        return None

    @property
    def conditions(self) -> list[Needs | Ascending]:
        """Conditions that a value fulfils together with other options."""
        metadata = getattr(self.annotation, "__metadata__", ())
        return [condition for condition in metadata if isinstance(condition, (Needs, Ascending))]

    @property
    def remedy(self) -> str:
        """The end of an error about the value."""
        return _REMEDIES.get((self.name, self.interval), f"the default is {self.default}")


# Options of TRL and transformers about speed, which have no effect in any trainer here
SPEED_OPTIONS = {
    "dataloader_in_order": Unused((True,), "rows always come in the order of the sampler", is_error=False),
    "dataloader_multiprocessing_context": Unused(
        (None, "fork"), "processes that read rows ahead are forked", is_error=False
    ),
    "dataloader_persistent_workers": Unused(
        (False,), "processes that read rows ahead live as long as the run, or an epoch", is_error=False
    ),
    "dataloader_prefetch_factor": Unused(
        (None,), "`media_prefetch` says how many batches are read ahead", is_error=False
    ),
    "use_liger_kernel": Unused(
        (False,),
        "the forward of this package scores packed rows; to fuse operations of layers, set `torch_compile=True`",
        is_error=False,
    ),
}
# Options of TRL that the trainers on datasets with completions (SFT, DPO, KTO, reward models) don't use. Those about
# the layout of batches change no result
UNUSED_IN_READING = {
    "dataset_num_proc": Unused(
        (None,),
        "rows are encoded when they are read; to use more processes, raise `dataloader_num_workers`",
        is_error=False,
    ),
    "pad_to_multiple_of": Unused((None, "auto"), "rows are padded only to the longest row of a batch", is_error=False),
    "padding_free": Unused((False,), "`packing` lays rows out without padding", is_error=False),
    "include_num_input_tokens_seen": Unused(("no", False), "the metric `num_tokens` counts them", is_error=False),
    "train_sampling_strategy": Unused(
        ("random", "sequential"),
        "lengths aren't known before rows are read; to bound the tokens of a forward, set `max_tokens_per_microbatch`",
    ),
}
# Options of TRL that the trainers that sample completions don't use
UNUSED_IN_SAMPLING = {
    "train_sampling_strategy": Unused(
        ("random",),
        "`shuffle_dataset` says whether rows are shuffled, and lengths aren't known before completions are sampled",
    ),
    "neftune_noise_alpha": Unused(
        (None,),
        "completions would be sampled by another policy than the one whose log-probabilities are trained",
    ),
}


@functools.cache
def options_of(config_class: type) -> dict[str, Option]:
    """Returns the table of a config's options by name, also of TRL's and transformers' fields."""
    annotations = typing.get_type_hints(config_class, include_extras=True)
    replacements = _ANNOTATIONS | getattr(config_class, "_annotations", {})
    annotations |= {name: annotation for name, annotation in replacements.items() if name in annotations}
    unused = SPEED_OPTIONS | getattr(config_class, "_unused", {})
    table = {}
    for member in fields(config_class):
        annotation = annotations[member.name]
        limits = _INTERVALS.get(member.name) or _CONDITIONS.get(member.name)
        if limits is not None and get_origin(annotation) is not Annotated:
            annotation = Annotated[annotation, limits]
        table[member.name] = Option(member.name, member.default, annotation, unused.get(member.name))
    return table


def check_values(config: Any, values: dict[str, Any] | None = None, label: str = "{}") -> None:
    """
    Checks the types and ranges of a config's fields, or of `values`, which are other values for some of the fields.
    `label` formats the names of fields in messages. Also raises an error if a field has no effect without other
    options, see [`Needs`].
    """
    values = vars(config) if values is None else values
    for name, option in options_of(type(config)).items():
        if name not in values or values[name] is None and name in _NONE_ALLOWED:
            continue
        check_value(f"`{label.format(name)}`", values[name], option.annotation, option.remedy)
        for condition in option.conditions:
            if values[name] != option.default:
                condition.check(name, config)


def settle_unused(config: Any, names: Iterable[str], warn: Callable[[str], None]) -> None:
    """
    Raises a `ValueError` for those of the named options that have no effect, unless they have a neutral value. Only
    warns of those about speed and layout, and sets them to their neutral value.
    """
    table = options_of(type(config))
    for name in names:
        unused = table[name].unused if name in table else None  # versions of transformers differ in their options
        if unused is None or getattr(config, name) in unused.neutral:
            continue
        label = f"`{name}={getattr(config, name)!r}` has no effect here"
        if unused.is_error:
            raise ValueError(f"{label}, so remove it: {unused.reason}.")
        setattr(config, name, unused.neutral[0])
        warn(f"{label}: {unused.reason}.")


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
    [`~spelling.read_json`]; transformers keeps a text without a brace, and doesn't name the option. Strips whitespace,
    in place.
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


def warn_of_rates(config: TrainingArguments) -> None:
    """Warns of a run without steps, and of a learning rate that no model survives."""
    if config.num_train_epochs == 0 and config.max_steps <= 0:
        logger.warning("`num_train_epochs=0` trains nothing; set it above 0, or set `max_steps`.")
    if config.learning_rate > 1:
        logger.warning(
            f"`learning_rate={config.learning_rate:g}` is far above any that trains a model; write 1e-6 for 0.000001."
        )


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
