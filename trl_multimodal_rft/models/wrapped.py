# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models within wrappers of training (DeepSpeed, FSDP, DDP) and of adapters, and their hidden states."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


if TYPE_CHECKING:
    from peft import PeftModel


def unwrapped(accelerator: Accelerator | None, model: nn.Module) -> PreTrainedModel:
    """Returns the model within the wrappers of Accelerate and of PEFT."""
    # Shortcuts: `unwrap_model` searches all modules of the model, and Accelerate's `is_peft_model` searches all
    # installed packages
    if isinstance(model, PreTrainedModel):
        return model
    if not _has_adapter(model) and accelerator is not None:
        model = accelerator.unwrap_model(model)
    return cast(PreTrainedModel, cast("PeftModel", model).get_base_model() if _has_adapter(model) else model)


def _has_adapter(model: nn.Module) -> bool:
    """Doesn't import PEFT, since no such model exists before an import."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Sets attributes or methods of one object within the context, without a change of its class."""
    # Values to set again at the end: of the object itself, of properties, and of `__getattr__`, such as submodules.
    # Names that only the class defines, such as methods, are deleted from the object instead.
    previous_values = {
        name: getattr(owner, name)
        for name, class_value in {name: getattr(type(owner), name, None) for name in values}.items()
        if name in vars(owner) or isinstance(class_value, property) or (class_value is None and hasattr(owner, name))
    }
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in previous_values:
                setattr(owner, name, previous_values[name])
            else:
                delattr(owner, name)


@contextmanager
def hidden_states(model: PreTrainedModel, *, instead_of_logits: bool = False) -> Iterator[list[torch.Tensor]]:
    """
    Collects the inputs of the LM head, `(rows, tokens, hidden_size)` per forward within the context, by a hook on the
    head if `base_model` is the model itself. With `instead_of_logits`, the head projects only the last token, to save
    memory, and the output has all states as `last_hidden_state`.
    """
    states: list[torch.Tensor] = []
    backbone = model.base_model
    head = model.get_output_embeddings()

    def collect(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        states.append(args[0])
        return (args[0][:, -1:], *args[1:]) if instead_of_logits else None

    def add_to_output(module: nn.Module, args: tuple, output: ModelOutput) -> None:
        if "logits" in output:
            output["last_hidden_state"] = states[-1]

    with ExitStack() as hooks:
        if backbone is not model:
            hooks.enter_context(backbone.register_forward_hook(lambda module, args, output: states.append(output[0])))
        else:
            head = head or model.get_decoder().get_output_embeddings()
            assert head is not None
            hooks.enter_context(head.register_forward_pre_hook(collect))
            if instead_of_logits:
                hooks.enter_context(model.register_forward_hook(add_to_output))
        yield states


def is_unsharded(accelerator: Accelerator) -> bool:
    """Returns whether ranks run forwards independently: every rank holds all weights, without DeepSpeed or FSDP."""
    plugins = (getattr(accelerator.state, f"{name}_plugin", None) for name in ("deepspeed", "fsdp"))
    return all(plugin is None for plugin in plugins)


def computing_dtype(accelerator: Accelerator, model: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of mixed precision, or else of the model."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, model.dtype)


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """Returns this rank's shard of a parameter, with FSDP (`DTensor`) or ZeRO-3 (`ds_tensor`), or else all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
