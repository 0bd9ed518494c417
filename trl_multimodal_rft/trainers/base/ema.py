# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An exponential moving average of weights."""

from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ...reporting.events import EventPart
from ..checkpoints.shards import writes_shards


_NAME = "ema"  # name of the file, or of the folder of shards, in a checkpoint


class MovingAverage(TrainerCallback):
    """
    Callback that averages weights after each update, in float32: a process that holds shards of the weights holds the
    same shards of the average.
    """

    @classmethod
    def of(cls, model: nn.Module, decay: float, option: str) -> "MovingAverage":
        """Returns the average of a model's trained weights. Raises `ValueError`, naming `option`, under ZeRO-3."""
        if is_deepspeed_zero3_enabled():
            raise ValueError(f"`{option}` averages whole weights, which ZeRO-3 doesn't keep; use ZeRO-2 or FSDP2.")
        return cls({name: p for name, p in model.named_parameters() if p.requires_grad}, decay, option)

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, option: str = "ema_decay"):
        self.option = option  # the option that asks for the average, for error messages
        self._update_average = get_ema_multi_avg_fn(decay)
        self._parameters = parameters
        self._fsdp_modules: list[FSDPModule] = []
        self._average = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: EventPart,
    ):
        self.follow(model)
        self.update()

    def follow(self, model: nn.Module) -> None:
        """
        Makes later updates average the weights of `model`. The weights are looked up by name, because wrappers such as
        FSDP move, replace or shard weights. All ranks must call this.
        """
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        parameters = fsdp2_canonicalize_names(dict(extract_model_from_parallel(model).named_parameters()))
        for name, average in self._average.items():
            self._parameters[name] = parameters[name]
            self._average[name] = _shard_like(average, parameters[name])

    def update(self) -> None:
        """Moves the average towards the current weights."""
        for name, parameter in self._parameters.items():  # one at a time, so that only one has a copy in float32
            self._update_average([self._average[name]], [parameter.detach().float()], None)

    @contextmanager
    def averaged_weights(self):
        """Gives the weights the values of the average within the context."""
        saved = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._set_weights(self._average)
        try:
            yield
        finally:
            self._reshard()
            self._set_weights(saved)

    def _reshard(self) -> None:
        """Makes the next forward gather all weights again, because FSDP2 keeps outdated weights of some modules."""
        for module in self._fsdp_modules:
            module.reshard()

    @torch.no_grad()
    def _set_weights(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this process's part of the average, by the names of the weights."""
        return self._average

    def save(self, checkpoint: Path, accelerator: Accelerator, writes: bool) -> None:
        """Writes the average into a checkpoint, in shards, or whole if this process `writes`. All ranks call this."""
        if writes_shards(accelerator):
            dcp.save(self._average, checkpoint_id=checkpoint / _NAME)
            return
        whole_average = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in self._average.items()}
        if writes:
            file = checkpoint / f"{_NAME}.safetensors"
            save_file({name: value.contiguous().cpu() for name, value in whole_average.items()}, file)

    def load(self, checkpoint: Path, accelerator: Accelerator) -> None:
        """Reads the average from a checkpoint. Raises `ValueError` if the checkpoint has none."""
        shards = writes_shards(accelerator)
        path = checkpoint / (_NAME if shards else f"{_NAME}.safetensors")
        if not path.exists():
            raise ValueError(
                f"{checkpoint} has no average of the weights; resume without `{self.option}`, or from a checkpoint "
                "that was saved with it and without `save_only_model`."
            )
        if shards:
            dcp.load(self._average, checkpoint_id=path)
            return
        for name, value in load_file(path).items():
            self._average[name].copy_(_shard_like(value, self._average[name]))


def _shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Moves a tensor to the device of `target`, and shards it like `target`, unless it is sharded already."""
    value = value.to(target.device)
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements)
    return value
