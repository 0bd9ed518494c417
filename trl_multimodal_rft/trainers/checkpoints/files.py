# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Folders and files of checkpoints."""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
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
from ...models.pretrained import require_all_weights
from ...models.wrapped import is_unsharded
from ...rollout.groups import SAVED_CLASSES


# Folder for checkpoints that are being written or deleted, and its subfolder for a checkpoint that is being replaced
PARTIAL = "_partial_checkpoint"
_REPLACED = "replaced"

# Words of the `RuntimeError` that `torch.save` raises if it can't write
_WRITE_ERRORS = ("inline_container", "Parent directory")


# Folders


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint's folder, or 0 for other folders."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else 0


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints in a folder, sorted by step."""
    paths = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) and path.is_dir()]
    return sorted(paths, key=step_of)


def surplus_checkpoints(current: Path, limit: int | None, needed: Collection[Path]) -> list[Path]:
    """
    Returns the checkpoints to delete so that `limit` checkpoints stay. Never returns `needed` checkpoints.

    Checkpoints of later steps than `current`, the one that is saved now, are of an earlier run, and go first. Then the
    earliest steps go. With a limit of 2, saving step 30 beside the steps 10, 20 and 40 deletes 40 and 10.
    """
    if limit is None or limit <= 0:
        return []
    # `checkpoints` sorts by step, because copying changes a folder's time. This stable sort puts later steps first
    paths = sorted(checkpoints(current.parent), key=lambda path: step_of(path) <= step_of(current))
    surplus = max(0, len(paths) - max(limit, len(needed)))
    return [checkpoint for checkpoint in paths if checkpoint not in needed][:surplus]


def replace_folder(written: Path, target: Path) -> None:
    """Moves `written` to `target`. An earlier `target` first moves to the parent of `written`, and back on errors."""
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
    """
    Adds a checkpoint's name and a remedy to write errors within the context. Removes the folder `partial` to free the
    disk, unless the replaced checkpoint is still in it.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _WRITE_ERRORS):
            raise
        code = getattr(error, "errno", None)  # errors of torch and safetensors have no code
        # With a stale handle of a network file system (`ESTALE`), a folder that can't be reached may still exist
        if code != errno.ESTALE and not os.path.exists(checkpoint.parent):
            raise FileNotFoundError(
                f"{str(checkpoint.parent)!r} was removed while {checkpoint.name} was written to it, with the "
                "checkpoints in it. Restore it and resume with `resume_from_checkpoint=True`, or start again."
            ) from error
        space = ""
        remedy = "Make the folder writable again, such as by mounting its file system anew,"
        if code in (None, errno.ENOSPC, errno.EDQUOT):
            space = f", where {shutil.disk_usage(checkpoint.parent).free / 2**20:,.0f} MB are free"
            remedy = "Make room, for example with a lower `save_total_limit`,"
        if partial is not None and not (partial / _REPLACED).exists():
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"{checkpoint.name} can't be written to {str(checkpoint.parent)!r}{space}: {error}. {remedy} and resume "
            "with `resume_from_checkpoint=True`; the checkpoints before are unchanged."
        ) from error


# State


def export_state(states: Any, objects: Iterable[Any]) -> None:
    """Puts the states of callbacks and of the trainer's control into `states`, which `Trainer` reads to resume."""
    for source in objects:
        if isinstance(source, ExportableState):
            name = type(source).__name__
            if isinstance(states[name], list):  # several callbacks have this class
                states[name].append(source.state())
            else:
                states[name] = source.state()


def save_rollout_state(checkpoint: str | Path, process_index: int, state: dict[str, Any]) -> None:
    """Saves the state of a process in a checkpoint, for [`load_rollout_state`]."""
    torch.save(state, Path(checkpoint, f"rollout_state_{process_index}.pt"))


def load_rollout_state(checkpoint: str | Path, process_index: int) -> dict[str, Any] | None:
    """
    Loads onto the CPU the state that [`save_rollout_state`] saved, without running code in the file.

    Returns the state, or `None` if the checkpoint has no state of this process.
    """
    path = Path(checkpoint, f"rollout_state_{process_index}.pt")
    if not path.exists():
        return None
    with torch.serialization.safe_globals([*SAVED_CLASSES]):
        return torch.load(path, map_location="cpu", weights_only=True)


# Weights


def whole_state_dict(
    accelerator: Accelerator, module: nn.Module, keeps: bool, select: Callable[[str], bool] = bool
) -> dict[str, torch.Tensor] | None:
    """
    Gathers sharded weights on the CPU, one at a time. Skips a weight if `select(name)` is false, by default none. All
    ranks must call this.

    Returns the state dict, which is empty unless this process `keeps` it. Returns `None` if weights aren't sharded,
    because the module's own `state_dict` is whole then.
    """
    if is_unsharded(accelerator):
        return None
    gather = DistributedBackend(accelerator).gather_params
    copies: dict[int, torch.Tensor] = {}  # by id, so that tied weights are copied once
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not select(name):
            continue
        with gather([value]):
            weight = value.full_tensor() if isinstance(value, DTensor) else value
            if keeps:
                if id(value) not in copies:
                    copies[id(value)] = weight.detach().to("cpu", copy=True)
                state[name] = copies[id(value)]
    return state


def save_unsharded(accelerator: Accelerator, model: nn.Module, folder: str | Path, writes: bool) -> None:
    """
    Saves a model, which may be sharded, to a folder with whole weights for `from_pretrained`, if this process
    `writes`. All ranks must call this.
    """
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
    Saves the config and processor of a model whose weights are saved elsewhere. Adapters, which are small, are saved
    whole. All ranks must call this.
    """
    policy = policy_alone(accelerator.unwrap_model(model))
    if is_peft_model(policy):
        adapters = tuple(f".{name}" for name in policy.peft_config)  # parts of the names of their weights
        state = whole_state_dict(accelerator, policy, writes, lambda name: any(key in name for key in adapters))
        if writes:
            policy.save_pretrained(folder, state_dict=state)
    elif writes:
        policy.config.save_pretrained(folder)
        if policy.can_generate():
            policy.generation_config.save_pretrained(folder)
    if writes:
        processing_class.save_pretrained(folder)


@require_all_weights()
def load_unsharded(accelerator: Accelerator, model: nn.Module, folder: str | Path) -> None:
    """
    Loads the whole weights in a folder into a model, which may be sharded. Raises `FileNotFoundError` if the folder
    has no model. All ranks must call this.
    """
    if not Path(folder, CONFIG_NAME).exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}, so it isn't a saved model, or no longer a whole one.")
    model = accelerator.unwrap_model(model)
    # FSDP2 gives a model a class that inherits from `FSDPModule` and from the model's own class
    model_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    if accelerator.distributed_type == DistributedType.FSDP:
        # Only the main process loads weights, and broadcasts them; with `fsdp_cpu_ram_efficient_loading`, other
        # processes couldn't load them
        is_main = accelerator.is_main_process
        state = model_class.from_pretrained(folder, dtype=model.dtype).state_dict() if is_main else {}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return
    saved_model = model_class.from_pretrained(folder, dtype=model.dtype)
    if is_deepspeed_zero3_enabled():  # ZeRO-3 has sharded the loaded model, too
        SyncRefModelCallback.sync_target_model(saved_model, model, 1.0)  # at 1.0, copies the weights
    else:
        model.load_state_dict(saved_model.state_dict())
