# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The arguments that transformers passes to callbacks by name."""

from typing import TypedDict

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin


class Event(TypedDict, total=False):
    """Parts of a trainer as they are at an event of its run."""

    model: nn.Module
    processing_class: ProcessorMixin | PreTrainedTokenizerBase
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    train_dataloader: DataLoader
    eval_dataloader: DataLoader
