# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What every stage of a rollout reads: the config, the processes, the current models and step, and the metrics."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from accelerate import Accelerator
from torch import nn

from ...algorithms.metrics import MetricLog
from ...policy import Live


def attribute_of(holder: str, name: str, is_late: bool = False) -> Any:
    """
    Returns a property for the attribute `name` of another object, which the instance has as `holder`. With the holder
    `_live` and the name `model`, the property `trainer.model` reads and sets `trainer._live.model`. If `is_late`,
    values that TRL's constructor sets before there is a holder are those that the holder begins with, and are dropped.
    """

    def set_value(owner: Any, value: Any) -> None:
        if not is_late or holder in vars(owner):
            setattr(getattr(owner, holder), name, value)

    return property(attrgetter(f"{holder}.{name}"), set_value)


@dataclass(frozen=True)
class Context:
    """What all stages of a run read and none of them owns."""

    args: Any  # the config of the trainer
    accelerator: Accelerator
    live: Live
    metrics: MetricLog
    group_sizes: tuple[int, int]  # completions per prompt, in training and in evaluation

    @property
    def model(self) -> nn.Module:
        """The policy, as prepared for training."""
        return self.live.model

    @property
    def step(self) -> int:
        return self.live.state.global_step

    @property
    def is_training(self) -> bool:
        """`True` in training, `False` in evaluation."""
        return self.model.training

    @property
    def group_size(self) -> int:
        """Number of completions per prompt in the current mode, training or evaluation."""
        return self.group_sizes[not self.is_training]

    @property
    def batch_size(self) -> int:
        """Number of completions per forward in the current mode."""
        return self.args.per_device_train_batch_size if self.is_training else self.args.per_device_eval_batch_size
