# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Type of the arguments that transformers passes to callbacks by name, and callbacks that errors call."""

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


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


class ErrorCallback(TrainerCallback):
    """Callback that also learns of an error or Ctrl-C that ends a run. `Trainer` then calls no `on_train_end`."""

    def on_error(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        """
        Event at the end of a run by an error.

        Args:
            args ([`~transformers.TrainingArguments`]):
                Arguments of the run.
            state ([`~transformers.TrainerState`]):
                Step and log at the error.
            control ([`~transformers.TrainerControl`]):
                Flags of the training loop.
            parts:
                Model, processor, optimizer and other parts of the trainer, by name.
        """
