# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Folders and files of checkpoints."""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME
from trl.distributed import DistributedBackend
from trl.trainer.callbacks import SyncRefModelCallback

from ...models.critic import policy_alone
from ...models.pretrained import whole_weights
from ...models.wrapped import is_unsharded
from ...rollout.groups import SAVED_CLASSES


# Where a checkpoint is until it is whole and before it is deleted, and there, the one that another replaces
PARTIAL = "_partial_checkpoint"
_REPLACED = "replaced"

# What `torch.save` says where it can't write; it raises a `RuntimeError`
_WRITE_ERRORS = ("inline_container", "Parent directory")


# Folders


def step_of(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else 0


def checkpoints(folder: str | Path) -> list[Path]:
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) and path.is_dir()]
    return sorted(found, key=step_of)


def surplus_checkpoints(newest: Path, limit: int | None, kept: Collection[Path]) -> list[Path]:
    """The checkpoints beyond a limit after the newest was saved, in the order of their steps."""
    if limit is None or limit <= 0:
        return []
    # Times of folders mean nothing after a copy. Later steps than the newest are of a run before
    found = sorted(checkpoints(newest.parent), key=lambda each: step_of(each) <= step_of(newest))
    surplus = max(0, len(found) - max(limit, len(kept)))
    return [checkpoint for checkpoint in found if checkpoint not in kept][:surplus]


def replace_folder(written: Path, target: Path) -> None:
    """Moves a folder to its target; what was there goes to where the folder was written."""
    replaced = written.parent / _REPLACED
    if target.exists():
        target.rename(replaced)
    try:
        written.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise


@contextmanager
def naming_write_errors(checkpoint: Path, partial: Path | None) -> Iterator[None]:
    """Errors within the context name the checkpoint, and leave the disk to the older ones: `partial` is removed."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _WRITE_ERRORS):
            raise
        number = getattr(error, "errno", None)
        if number != errno.ESTALE and not os.path.exists(checkpoint.parent):
            raise FileNotFoundError(
                f"{str(checkpoint.parent)!r} was removed while {checkpoint.name} was written to it, with the "
                "checkpoints in it. Restore it and resume with `resume_from_checkpoint=True`, or start again."
            ) from error
        where, remedy = "", "Make the folder writable again, such as by mounting its file system anew,"
        if number in (None, errno.ENOSPC, errno.EDQUOT):
            where = f", where {shutil.disk_usage(checkpoint.parent).free / 2**20:,.0f} MB are free"
            remedy = "Make room, for example with a lower `save_total_limit`,"
        if partial is not None and not (partial / _REPLACED).exists():
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"{checkpoint.name} can't be written to {str(checkpoint.parent)!r}{where}: {error}. {remedy} and resume "
            "with `resume_from_checkpoint=True`; the checkpoints before are unchanged."
        ) from error


# State


def export_state(states: Any, objects: Iterable[Any]) -> None:
    """Puts the states of callbacks and of the control where `Trainer` reads them when it resumes."""
    for each in objects:
        if isinstance(each, ExportableState):
            name = type(each).__name__
            if isinstance(states[name], list):  # of several callbacks of a class
                states[name].append(each.state())
            else:
                states[name] = each.state()


def save_rollout_state(checkpoint: str | Path, process_index: int, state: dict[str, Any]) -> None:
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


# Weights


def whole_state_dict(
    accelerator: Accelerator, module: nn.Module, kept: bool, select: Callable[[str], bool] = bool
) -> dict[str, torch.Tensor] | None:
    """
    The weights of a module on the CPU, gathered one by one where processes hold them in part: those whose names
    `select` accepts, by default all. All processes have to call this.

    Returns the state dict, empty on processes that don't keep it; `None` where the module's own is whole.
    """
    if is_unsharded(accelerator):
        return None
    gathered = DistributedBackend(accelerator).gather_params
    copies: dict[int, torch.Tensor] = {}  # tied weights once
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not select(name):
            continue
        with gathered([value]):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if kept:
                if id(value) not in copies:
                    copies[id(value)] = whole.detach().to("cpu", copy=True)
                state[name] = copies[id(value)]
    return state


def save_unsharded(accelerator: Accelerator, model: nn.Module, folder: str | Path, writes: bool) -> None:
    """Saves a model as `from_pretrained` reads it. All processes have to call this."""
    model = accelerator.unwrap_model(model)
    state = whole_state_dict(accelerator, model, writes)
    if writes:
        model.save_pretrained(folder, state_dict=state)


def save_without_weights(
    accelerator: Accelerator,
    model: nn.Module,
    processing_class: ProcessorMixin | PreTrainedTokenizerBase,
    folder: Path,
    writes: bool,
) -> None:
    """
    Saves what makes a model of weights that are saved elsewhere: config and processor. Adapters, which are small, are
    saved whole. All processes have to call this.
    """
    policy = policy_alone(accelerator.unwrap_model(model))
    if is_peft_model(policy):
        adapters = tuple(f".{name}" for name in policy.peft_config)
        state = whole_state_dict(accelerator, policy, writes, lambda name: any(each in name for each in adapters))
        if writes:
            policy.save_pretrained(folder, state_dict=state)
    elif writes:
        policy.config.save_pretrained(folder)
        if policy.can_generate():
            policy.generation_config.save_pretrained(folder)
    if writes:
        processing_class.save_pretrained(folder)


@whole_weights()
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
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return
    saved = model_class.from_pretrained(folder, dtype=model.dtype)
    if is_deepspeed_zero3_enabled():  # which has split what was loaded, too
        SyncRefModelCallback.sync_target_model(saved, model, 1.0)
    else:
        model.load_state_dict(saved.state_dict())


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
