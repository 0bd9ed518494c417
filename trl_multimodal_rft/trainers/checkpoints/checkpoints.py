# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The checkpoints of a run: found and verified, saved whole, and loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import TrainerState
from transformers.utils import PushInProgress

from ...reporting.hub import is_running
from ..base.ema import MovingAverage
from ..base.optimizer import parts_mismatch
from .files import (
    PARTIAL,
    checkpoints,
    load_rollout_state,
    naming_write_errors,
    replace_folder,
    save_rollout_state,
    surplus_checkpoints,
)
from .manifest import MANIFEST, measure_folder, resume_warnings, run_mismatch, verify_checkpoint, write_manifest
from .shards import check_shards, layout_mismatch, load_module, save_module, writes_shards


logger = get_logger(__name__)

# Folder inside a checkpoint that holds the reference, if `sync_ref_model` changes it
_REFERENCE = "ref_model"

# Fingerprints of the training datasets, by the names of their arguments
Fingerprints = Callable[[], dict[str, dict[str, Any]]]


class Checkpoints:
    """
    The checkpoints of a run. A checkpoint exists whole or not at all, even if the run is killed. All ranks must call
    each method.
    """

    def __init__(self, args: Any, accelerator: Accelerator, method: str):
        self.args = args
        self.accelerator = accelerator
        self.method = method  # of the trainer, such as "grpo"
        self.resumed_from: str | None = None  # checkpoint from which the run resumes
        self.pushed: Path | None = None  # checkpoint that was pushed last

    # Before a run resumes

    def verify(self, resume_from: str | Path | bool, fingerprints: Fingerprints, has_adapter: bool) -> str:
        """
        Returns the checkpoint to resume from, the same on all processes.

        Raises `ValueError` if none is whole, or if another kind of run has saved it.
        """
        folder = self._whole(resume_from, fingerprints)
        # The main process compares the checkpoint with this run, and all processes raise the same error
        obstacle = None
        if self.args.should_save:
            obstacle = run_mismatch(folder, self.method, has_adapter)
            obstacle = obstacle or layout_mismatch(self.accelerator, folder) or parts_mismatch(folder, self.args)
        (obstacle,) = broadcast_object_list([obstacle])
        if obstacle is not None:
            raise ValueError(obstacle)
        return folder

    def _whole(self, resume_from: str | Path | bool, fingerprints: Fingerprints) -> str:
        folders = [str(resume_from)]
        if resume_from is True:
            folders = [str(path) for path in reversed(checkpoints(self.args.output_dir))]
            (folders,) = broadcast_object_list([folders])
        reasons = []
        for folder in folders:
            problems = gather_object(verify_checkpoint(folder) if self.args.should_save else [])
            problems = list(dict.fromkeys(problems))
            if not problems:
                if self.args.should_save:
                    for warning in resume_warnings(folder, fingerprints()):
                        logger.warning(warning)
                return folder
            reasons.append(f"{folder} isn't whole: {'; '.join(problems[:5])}{'; ...' if len(problems) > 5 else ''}.")
            if resume_from is True:
                logger.warning(f"Passed over: {reasons[-1]}")
        if resume_from is True and not folders:
            raise ValueError(
                f"There is no checkpoint in {self.args.output_dir!r} to resume from; leave `resume_from_checkpoint` "
                "out to start a new run."
            )
        if resume_from is True:
            raise ValueError(" ".join([f"There is no whole checkpoint in {self.args.output_dir!r}.", *reasons]))
        has_manifest = Path(folders[0], MANIFEST).is_file()
        remedy = f", or delete {MANIFEST} in this one to resume from the remaining files" if has_manifest else ""
        raise ValueError(
            f"{reasons[0]} Resume from another checkpoint (`resume_from_checkpoint=True` finds the newest whole one "
            f"in `output_dir`){remedy}."
        )

    # Saving

    def begin(self, target: Path) -> None:
        """Removes what a run left that was killed while it saved. Warns if `output_dir` has gone."""
        if self.args.should_save:
            if not Path(self.args.output_dir).exists():
                logger.warning(
                    f"`output_dir` {self.args.output_dir!r} was removed during the run, with the checkpoints in it; "
                    f"{target.name} is saved to a new folder."
                )
            if (target.parent / PARTIAL).exists():
                shutil.rmtree(target.parent / PARTIAL)
        self.accelerator.wait_for_everyone()

    def save(
        self, target: Path, write: Callable[[Path], None], state: TrainerState, push: PushInProgress | None
    ) -> None:
        """
        Lets `write` fill a temporary folder, and moves the whole checkpoint to its place. Then moves surplus
        checkpoints to the temporary folder, and deletes them there. `push` is the push of a checkpoint in progress.

        For example, `_partial_checkpoint/checkpoint-30` becomes `checkpoint-30`, then `checkpoint-10` becomes
        `_partial_checkpoint/checkpoint-10`.
        """
        temporary_folder = target.parent / PARTIAL
        writes = self.args.should_save
        with naming_write_errors(target, temporary_folder if writes else None):
            write(temporary_folder / target.name)
            if writes:
                replace_folder(temporary_folder / target.name, target)
                needed = {target}
                if state.best_model_checkpoint:
                    needed.add(Path(state.best_model_checkpoint))
                for checkpoint in surplus_checkpoints(target, self.args.save_total_limit, needed):
                    # A checkpoint that is being pushed stays until a later save
                    if checkpoint != self.pushed or not is_running(push):
                        checkpoint.rename(temporary_folder / checkpoint.name)
                # The next save removes files that can't be removed now
                shutil.rmtree(temporary_folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def save_state(
        self, folder: Path, state: dict[str, Any], reference: nn.Module | None, average: MovingAverage | None
    ) -> None:
        """Saves what transformers doesn't: the state of this process, and a reference and an average that change."""
        save_rollout_state(folder, self.accelerator.process_index, state)
        if self._syncs_reference:
            assert reference is not None
            save_module(self.accelerator, reference, folder / _REFERENCE, self.args.should_save)
        if average is not None:
            average.save(folder, self.accelerator, self.args.should_save)

    def seal(self, folder: Path, fingerprints: Fingerprints) -> None:
        """Writes the manifest of a checkpoint's files, after all of them."""
        index = self.accelerator.process_index
        measurements = None
        if writes_shards(self.accelerator):
            if index == 0:
                check_shards(folder)
            measurements = measure_folder(folder, index, self.accelerator.num_processes)
        if self.args.should_save:
            write_manifest(folder, self.args.save_only_model, fingerprints(), measurements, self.method)

    # Loading

    def load_state(
        self, folder: Path, model: nn.Module, reference: nn.Module | None, average: MovingAverage | None
    ) -> dict[str, Any] | None:
        """Loads what [`save_state`] saved, and returns this process's state, or `None` if the checkpoint has none."""
        if self._syncs_reference:
            if not (folder / _REFERENCE).is_dir():
                raise ValueError(
                    f"{folder} has no folder {_REFERENCE!r} with a reference that follows the policy, so that "
                    "`sync_ref_model` would start again from the initial reference. Resume from a checkpoint that was "
                    "saved with `sync_ref_model` and without `save_only_model`, or set `sync_ref_model=False`."
                )
            assert reference is not None
            load_module(self.accelerator, reference, folder / _REFERENCE)
        if average is not None:
            average.follow(model)
            average.load(folder, self.accelerator)
        # Each rank has its file. If this run has more ranks than the previous run, further ranks read the file of rank
        # 0, for the state that all ranks share
        state = load_rollout_state(folder, self.accelerator.process_index)
        if state is None:
            state = load_rollout_state(folder, 0)
        if state is None:
            logger.warning(f"{folder} has no state of the rollouts; the run continues with new completions.")
        return state

    @property
    def _syncs_reference(self) -> bool:
        return getattr(self.args, "sync_ref_model", False)
