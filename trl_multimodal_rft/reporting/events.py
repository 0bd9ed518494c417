# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Type of the arguments that transformers passes to callbacks by name."""

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin


# A part of the trainer, the metrics of an evaluation, or the values of a log
EventPart = (
    nn.Module
    | PreTrainedTokenizerBase
    | ProcessorMixin
    | Optimizer
    | LRScheduler
    | DataLoader
    | dict[str, float]
    | None
)
