# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checkpoints of FSDP in shards (`SHARDED_STATE_DICT`), which each process writes and reads itself."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import StateDictType

from ...encoding.model_folders import SHARDS
from ...models.wrapped import replaced
from .files import load_unsharded, save_unsharded


_METADATA = ".metadata"  # the file that says which shard holds which weights


def writes_shards(accelerator: Accelerator) -> bool:
    """Returns whether each process writes its part of weights and optimizer to checkpoints."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT


def saving_whole_weights(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Returns a context in which `Trainer.save_model` saves whole weights, even if the run saves shards."""
    if not writes_shards(accelerator):
        return nullcontext()
    return replaced(accelerator.state.fsdp_plugin, state_dict_type=StateDictType.FULL_STATE_DICT)


def save_module(accelerator: Accelerator, model: nn.Module, folder: Path, writes: bool) -> None:
    """
    Saves a module's weights as the run saves the policy's, in shards or whole. Whole weights are written by the
    process for which `writes` is `True`. All ranks must call this.
    """
    if writes_shards(accelerator):
        dcp.save(model.state_dict(), checkpoint_id=folder)
    else:
        save_unsharded(accelerator, model, folder, writes)


def load_module(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Loads a module that [`save_module`] saved, in the layout of this run. All ranks must call this."""
    if writes_shards(accelerator):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    else:
        load_unsharded(accelerator, model, folder)


def check_shards(checkpoint: Path) -> None:
    """Raises `FileNotFoundError` if this process doesn't see the shards of other processes."""
    for metadata in checkpoint.rglob(_METADATA):
        storage = FileSystemReader(metadata.parent).read_metadata().storage_data or {}
        for name in sorted({info.relative_path for info in storage.values()}):
            if not (metadata.parent / name).exists():
                raise FileNotFoundError(
                    f"{(metadata.parent / name).relative_to(checkpoint)} isn't there. Shards need an `output_dir` on "
                    "a disk that all machines share; without one, launch with `--fsdp_state_dict_type FULL_STATE_DICT`"
                )


def layout_mismatch(accelerator: Accelerator, checkpoint: str | Path) -> str | None:
    """
    Returns an error message if a run can't resume from the layout of a checkpoint, or `None`.

    A run with FSDP reads weights and optimizer states only in the layout that it saves, sharded or whole. A run
    without FSDP reads neither layout. A run without DeepSpeed can't read optimizer states of DeepSpeed.
    """
    if Path(checkpoint, "latest").exists() and getattr(accelerator.state, "deepspeed_plugin", None) is None:
        return (
            f"{checkpoint} was saved with DeepSpeed, and this run is without, so that it would begin with a new "
            "optimizer state. Resume with the `--accelerate_config` of that run, such as `zero2`, or train the "
            f"weights of {checkpoint} anew."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    run_layout = "" if plugin is None else plugin.state_dict_type.name  # `""` stands for a run without FSDP
    files = {"SHARDED_STATE_DICT": SHARDS, "FULL_STATE_DICT": f"{FSDP_MODEL_NAME}.bin"}
    layouts = [layout for layout, name in files.items() if Path(checkpoint, name).exists()]
    if run_layout in (layouts or [""]):
        return None
    saved = f"with FSDP's `{layouts[0]}`" if layouts else "without FSDP (or with `save_only_model`)"
    current = f"with FSDP's `{run_layout}`" if run_layout else "without FSDP"
    remedy = f"the `--accelerate_config` of that run, such as `multi_gpu`, or train the weights of {checkpoint} anew"
    if layouts:
        remedy = f"`--accelerate_config fsdp2 --fsdp_state_dict_type {layouts[0]}`, on any number of GPUs"
    return f"{checkpoint} was saved {saved}, and this run is {current}. Resume with {remedy}."
