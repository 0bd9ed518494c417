# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a checkpoint must hold beyond TRL's for a resumed run to go on as if it hadn't stopped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME
from trl.trainer.callbacks import SyncRefModelCallback

from ..rollout.groups import SAVED_CLASSES


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else 0


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run."""
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) and path.is_dir()]
    return sorted(found, key=step_of)


def save_rollout_state(checkpoint: str | Path, process_index: int, state: dict[str, Any]) -> None:
    """Writes a process's part of the state."""
    torch.save(state, Path(checkpoint, f"rollout_state_{process_index}.pt"))


def load_rollout_state(
    checkpoint: str | Path, process_index: int, classes: Sequence[type] = SAVED_CLASSES
) -> dict[str, Any] | None:
    """
    Reads what [`save_rollout_state`] wrote, onto the CPU. No code in the file is run.

    Returns the state; `None` if the checkpoint has none for this process.
    """
    path = Path(checkpoint, f"rollout_state_{process_index}.pt")
    if not path.exists():
        return None
    with torch.serialization.safe_globals([*classes]):
        return torch.load(path, map_location="cpu", weights_only=True)


def save_unsharded(accelerator: Accelerator, model: nn.Module, folder: str | Path, is_main_process: bool) -> None:
    """
    Saves a model as `from_pretrained` reads it, also where processes hold its weights in part. All of them have to
    call this.
    """
    state = None
    if is_deepspeed_zero3_enabled():
        state = model._zero3_consolidated_16bit_state_dict()  # in the dtype that the weights have
    elif accelerator.distributed_type == DistributedType.FSDP:
        state = accelerator.get_state_dict(model)
    if is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)


def load_unsharded(accelerator: Accelerator, model: nn.Module, folder: str | Path) -> None:
    """Gives a model the weights that are saved in a folder. All processes have to call this."""
    if not Path(folder, CONFIG_NAME).exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}, so it isn't a saved model, or no longer a whole one.")
    model = accelerator.unwrap_model(model)
    model_class = next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))
    if accelerator.distributed_type == DistributedType.FSDP:
        # On other processes, transformers may leave out what it loads
        first = accelerator.is_main_process
        state = model_class.from_pretrained(folder, dtype=model.dtype).state_dict() if first else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        return
    saved = model_class.from_pretrained(folder, dtype=model.dtype)
    if is_deepspeed_zero3_enabled():  # which has split what was loaded, too
        SyncRefModelCallback.sync_target_model(saved, model, 1.0)
    else:
        model.load_state_dict(saved.state_dict())


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
