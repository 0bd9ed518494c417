# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models within wrappers of engines and adapters, and what is within models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel


def unwrapped(accelerator: Accelerator | None, model: nn.Module) -> PreTrainedModel:
    """The model within wrappers of the engine and of PEFT."""
    if isinstance(model, PreTrainedModel):
        return model  # nothing is around it; Accelerate looks through all installed packages to tell
    own: Any = model if accelerator is None else accelerator.unwrap_model(model)
    return own.get_base_model() if is_peft_model(own) else own


@contextmanager
def hidden_states(model: PreTrainedModel, *, instead_of_logits: bool = False) -> Iterator[list[torch.Tensor]]:
    """
    Collects the states that the LM head gets, of each forward within the context.

    A model that merges media and holds a language model with its head has no backbone whose outputs they are. They are
    taken at its head then, which leaves out what the head leaves out.

    Shapes: returns `(B, S, hidden_size)`.
    """
    states: list[torch.Tensor] = []
    backbone, head = model.base_model, model.get_output_embeddings()

    def take(module, args):
        states.append(args[0])
        return (args[0][:, -1:], *args[1:]) if instead_of_logits else None

    def give_away(module, args, output):
        if "logits" in output:
            output["last_hidden_state"] = states[-1]

    if backbone is not model:
        handles = [backbone.register_forward_hook(lambda module, args, output: states.append(output[0]))]
    else:
        head = head or model.get_decoder().get_output_embeddings()
        handles = [head.register_forward_pre_hook(take)]
        if instead_of_logits:
            handles.append(model.register_forward_hook(give_away))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def is_unsharded(accelerator: Accelerator) -> bool:
    """
    Whether processes run forwards without each other: all hold all weights, and no engine stands between.
    """
    engines = (getattr(accelerator.state, f"{name}_plugin", None) for name in ("deepspeed", "fsdp"))
    return all(engine is None for engine in engines)


def computing_dtype(accelerator: Accelerator, model: PreTrainedModel) -> torch.dtype:
    """What a model computes in: that of mixed precision, or else its own."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return autocast.get(accelerator.mixed_precision, model.dtype)
