# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which values the arguments of [`PPOTrainerVL`] take: those that were passed, or those of the strategy."""

import copy
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from transformers import GenerationConfig

from ...trainers.ppo.config import MultimodalPPOConfig
from ..option_types import check_option
from ..strategy import OPTIONS, RULES, convert_options
from ..strategy_object import Strategy


Constructor = TypeVar("Constructor", bound=Callable)
Value = TypeVar("Value")


def remember_passed(constructor: Constructor) -> Constructor:
    """
    Decorates a constructor so that the attribute `passed` holds the names of the arguments that were passed, before
    the constructor runs.
    """
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def construct(self, *args, **kwargs):
        self.passed = {*signature.bind(self, *args, **kwargs).arguments}
        constructor(self, *args, **kwargs)

    return cast(Constructor, construct)


# The field that holds the value of an argument
_FIELDS = {"ema_beta": "ema_decay", "value_clip": "cliprange_value"}
_FIELDS |= {name: name for name in ("kl_target", "kl_horizon", "dataloader_pin_memory")}
for _name in ("init_kl_coef", "ptx_coef", "micro_train_batch_size", "eps_clip", "gradient_checkpointing"):
    _FIELDS[_name] = OPTIONS[_name]
for _name in ("max_epochs", "max_norm", "disable_ds_ckpt"):
    _FIELDS[_name] = OPTIONS[_name]

# Arguments that only the command line of a strategy has
_OF_COMMAND_LINE = "prompt_max_len micro_rollout_batch_size buffer_limit buffer_cpu_offload remote_rm_url save_hf_ckpt"
# Options of sampling, and their names on the command line
_OF_SAMPLING = {name: name for name in ("gamma", "lambd", "temperature", "top_p")} | {
    "max_new_tokens": "generate_max_len"
}


def _option(strategy: MultimodalPPOConfig, name: str) -> Any:
    """Returns the value of an option on the command line of a strategy, or `None`."""
    return getattr(strategy.args, name, None) if isinstance(strategy, Strategy) else None


def _unasked(strategy: MultimodalPPOConfig) -> dict[str, Any]:
    """Returns the values of fields that nobody has asked for."""
    defaults = {field.name: field.default for field in fields(strategy)}
    defaults["dataloader_pin_memory"] = torch.accelerator.is_available()  # else the config sets it to `False`
    return defaults | (strategy.unasked if isinstance(strategy, Strategy) else {})


def _plain(value: Value) -> Value | list:
    """Returns a value such that lists and tuples are equal, and an address and a list of it."""
    return [value] if isinstance(value, str) else [*value] if isinstance(value, (list, tuple)) else value


def _contradiction(
    strategy: MultimodalPPOConfig, name: str, value: float | str | None, option: str, field: str
) -> ValueError:
    """Returns the error for a value that was passed, and another one of an option or of a field."""
    option_value = _option(strategy, option)
    other = f"`{field}={getattr(strategy, field, None)!r}` of `strategy`"
    if option_value is not None:
        other = f"`{option}={option_value!r}` of the strategy's command line"
    return ValueError(f"`{name}={value!r}` contradicts {other}; remove one of them.")


def resolve_arguments(
    strategy: MultimodalPPOConfig, arguments: dict[str, Any], passed: Collection[str]
) -> SimpleNamespace:
    """
    Returns the arguments of [`PPOTrainerVL`] that a strategy may have, too. A value that was passed, and one that was
    set in the strategy, win over defaults.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            Its fields are set if they aren't the defaults, or if the command line has their option.
        arguments (`dict`):
            Values that were passed, and defaults.
        passed (`Collection[str]`):
            Names of the arguments that were passed. A value that was passed from the command line of the strategy
            (`ptx_coef=args.ptx_coef`) means what the strategy has made of it.

    Returns:
        `types.SimpleNamespace`: The values by the names of arguments.

    Raises:
        `ValueError`: If a value that was passed isn't of its type, is out of range, or contradicts one that was set in
            the strategy.
    """
    unasked = _unasked(strategy)
    values = {}
    for name in (*_FIELDS, *_OF_COMMAND_LINE.split()):
        value = arguments[name]
        if value is not None:
            check_option(name, value)
        option = _option(strategy, name)
        of_strategy = option
        is_set = option is not None
        field = name
        if name in _FIELDS:
            field = _FIELDS[name]
            of_strategy = getattr(strategy, field)
            is_set = is_set or of_strategy != unasked[field]
            # Without its switch, an option of the command line has set no field
            is_idle = of_strategy is None or name == "kl_horizon" and strategy.kl_target is None
            of_strategy = option if is_idle and is_set else of_strategy
        if name in passed and not (option is not None and option == value):
            if is_set and _plain(of_strategy) != _plain(value):
                raise _contradiction(strategy, name, value, name, field)
        elif is_set or field in strategy.passed and of_strategy is not None:
            value = of_strategy
        values[name] = value
    return SimpleNamespace(**values)


def take_keywords(
    strategy: MultimodalPPOConfig, keywords: dict[str, Any]
) -> tuple[MultimodalPPOConfig, dict[str, Any]]:
    """
    Splits the further keywords of [`PPOTrainerVL`] into options of sampling, and options of the command line, which
    LightRFT's trainer takes, too: these mean what they mean there.

    Args:
        strategy ([`MultimodalPPOConfig`]):
            The strategy, which stays as it is.
        keywords (`dict`):
            The keywords. An option of sampling that is `None` isn't set.

    Returns:
        `tuple`: The strategy, or a copy with the options, and the options of sampling, with `gamma` and `top_p` of the
        strategy's command line.

    Raises:
        `ValueError`: If an option can't be had, or contradicts the strategy.
    """
    of_sampling = {*vars(GenerationConfig()), *_OF_SAMPLING}
    sampling = {}
    options = {}
    for name, value in keywords.items():
        if name in RULES and name not in of_sampling:
            options[name] = value
        elif name != "reward_tokenizers" and not (name in of_sampling and value is None):
            sampling[name] = value
    for name, option in _OF_SAMPLING.items():
        if name in sampling and _option(strategy, option) not in (None, sampling[name]):
            raise _contradiction(strategy, name, sampling[name], option, option)
    for name in ("top_p", "gamma"):
        is_of_estimator = name == "gamma" and strategy.estimator.name == "gae"
        if not is_of_estimator and name not in sampling and _option(strategy, name) not in (None, 1):
            sampling[name] = _option(strategy, name)
    return _with_options(strategy, options), sampling


def _with_options(strategy: MultimodalPPOConfig, options: dict[str, Any]) -> MultimodalPPOConfig:
    """Returns the strategy, or a copy with the fields that options set."""
    known = {
        "advantage_estimator": strategy.estimator.spelling,
        "micro_train_batch_size": strategy.per_device_train_batch_size,
        "n_samples_per_prompt": strategy.num_generations,
    }
    if isinstance(strategy, Strategy):
        known |= {name: value for name, value in vars(strategy.args).items() if value is not None}
    changed = {}
    for name, value in options.items():
        option_value = _option(strategy, name)
        if value is None or _plain(option_value) == _plain(value):
            continue
        if option_value is not None and option_value not in RULES[name].neutral:
            raise _contradiction(strategy, name, value, name, name)
        changed[name] = value
    converted = convert_options(changed, known | changed)
    converted.check()
    converted.log()
    unasked = _unasked(strategy)
    for field, value in converted.fields.items():
        if field != "report_to" and getattr(strategy, field) not in (unasked[field], value):
            option = converted.options_by_field[field]
            raise _contradiction(strategy, option, changed[option], "", field)
    if not converted.fields:
        return strategy
    config = copy.copy(strategy)  # as in `config_of`, which checks the fields
    vars(config).update(converted.fields)
    return config
