# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training and evaluation mode, and random states."""

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from .wrapped import replaced


logger = get_logger(__name__)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode within the context, and restores the modes of its submodules on exit."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the random states of Python, NumPy and torch on exit."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def checkpoint_activations(
    model: PreTrainedModel, kwargs: dict[str, bool] | str | None = None, enable: bool = True
) -> None:
    """Switches activation checkpointing on or off, by the method that the installed transformers doesn't deprecate."""
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if enable:
        getattr(model, f"{prefix}_checkpointing_enable")(kwargs)
    else:
        getattr(model, f"{prefix}_checkpointing_disable")()


def ignore_deprecated_names() -> None:
    """
    Hides warnings that users can't act on. TRL calls methods of models by names that transformers has deprecated, and
    transformers attributes these calls to itself.
    """
    names = "is_gradient_checkpointing|gradient_checkpointing_(en|dis)able"
    warnings.filterwarnings("ignore", f"`({names})` is deprecated", FutureWarning, r"transformers\.modeling_utils")


def disable_unsupported_checkpointing(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Switches off activation checkpointing, TRL's default, if the model doesn't support it, and warns."""
    if args.gradient_checkpointing and not model.supports_gradient_checkpointing:
        # Two names of one option
        for name in {"gradient_checkpointing", "activation_checkpointing"} & vars(args).keys():
            setattr(args, name, False)
        logger.warning(
            f"{type(model).__name__} has no gradient checkpointing, so it trains with `gradient_checkpointing=False`, "
            "which needs more memory."
        )


@contextmanager
def measurement_mode(
    model: nn.Module, device: torch.device, is_evaluation: bool = True, keeps_checkpointing: bool = False
) -> Iterator[None]:
    """
    Disables gradients, and by default training mode and checkpointing, within the context. Restores the random states
    of torch on exit.
    """
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        evaluation_mode(model) if is_evaluation else nullcontext(),
        nullcontext() if keeps_checkpointing else without_checkpointing(model),
    ):
        yield


@contextmanager
def without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Switches off activation checkpointing within the context, because it warns about forwards without a graph."""
    with ExitStack() as stack:
        for submodule in module.modules():
            # Not `getattr`, as wrappers would return the attributes of the modules inside
            if vars(submodule).get("gradient_checkpointing"):
                stack.enter_context(replaced(submodule, gradient_checkpointing=False))
        yield


# Parts of the names of PEFT's modules of dropout
_ADAPTER_DROPOUTS = ("lora_dropout", "boft_dropout")


def fix_encoders(model: PreTrainedModel) -> None:
    """
    Turns off dropout, and keeps batch norms at their running statistics, outside the language model; otherwise
    sampling and scoring would use different outputs. Other modules stay in training mode, for gradient checkpointing,
    and adapters keep their dropout.
    """
    language_model = {*model.get_decoder().modules()}
    for name, module in model.named_modules():
        if module in language_model or any(adapter_dropout in name for adapter_dropout in _ADAPTER_DROPOUTS):
            continue
        fix_batch_norms([module])
        for owner, rate in [*_dropout_rates(module)]:
            if owner is vars(module):  # other rates are those of adapters
                owner[rate] = 0.0


def turn_off_dropout(model: nn.Module) -> None:
    """Turns off all dropout of a model. TRL turns off that of `nn.Dropout`, which attention's dropout often isn't."""
    for module in model.modules():
        for owner, name in [*_dropout_rates(module)]:
            owner[name] = 0.0


def has_dropout(model: nn.Module) -> bool:
    """Returns whether forwards in training mode draw random numbers."""
    rates: list[float] = []
    for module in model.modules():
        rates += [owner[name] for owner, name in _dropout_rates(module)]
    return max(rates, default=0.0) > 0


def _dropout_rates(module: nn.Module) -> Iterator[tuple[dict[str, float], str]]:
    """Yields the dictionaries and keys of rates of dropout: attributes of a module, or rates by adapter."""
    is_dropout = "dropout" in type(module).__name__.lower()  # also PEFT's own modules
    for name, value in vars(module).items():
        if isinstance(value, float) and (is_dropout or "drop" in name):
            yield vars(module), name
        elif isinstance(value, dict) and "drop" in name:
            yield from ((value, adapter) for adapter, rate in value.items() if isinstance(rate, float))


def fix_batch_norms(modules: Iterable[nn.Module]) -> None:
    """Keeps the batch norms among modules at their running statistics."""
    for module in modules:
        is_fixed = _use_running_statistics in module._forward_pre_hooks.values()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not is_fixed:
            module.register_forward_pre_hook(_use_running_statistics)


def _use_running_statistics(module: nn.Module, args: tuple) -> None:
    """Forward pre-hook that keeps a batch norm in evaluation mode, although `Trainer` calls `model.train()`."""
    module.training = False
