# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models within wrappers of engines and adapters."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel


def unwrapped(accelerator: Accelerator | None, model: nn.Module) -> PreTrainedModel:
    """
    The model within wrappers of the engine and of PEFT.

    Args:
        accelerator ([`~accelerate.Accelerator`], *optional*):
            What prepared the model, if anything did.
        model (`torch.nn.Module`):
            Model.

    Returns:
        [`~transformers.PreTrainedModel`]: The model itself.
    """
    own: Any = model if accelerator is None else accelerator.unwrap_model(model)
    return own.get_base_model() if is_peft_model(own) else own


def is_whole(accelerator: Accelerator) -> bool:
    """
    Whether processes run forwards without each other: all hold all weights, and no engine stands between.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The processes.

    Returns:
        `bool`: Whether they do.
    """
    engines = (getattr(accelerator.state, f"{name}_plugin", None) for name in ("deepspeed", "fsdp"))
    return all(engine is None for engine in engines)


def computing_dtype(accelerator: Accelerator, model: PreTrainedModel) -> torch.dtype:
    """
    What a model computes in: that of mixed precision, or else its own.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            What prepared the model.
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.

    Returns:
        `torch.dtype`: The dtype.
    """
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return autocast.get(accelerator.mixed_precision, model.dtype)
