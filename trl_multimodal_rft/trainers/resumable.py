# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checkpoints from which a run goes on as if it hadn't stopped, and none of which is ever half there."""

import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checks.self_check import SelfCheck
from ..data.fingerprint import differences, fingerprint
from ..models.trainer_mixin import TrainerMixin
from ..models.wrapped import is_unsharded, unwrapped
from ..policy import Fallbacks
from ..rollout.groups import SAVED_CLASSES
from .checkpoint import checkpoints, load_rollout_state, load_unsharded, save_rollout_state, save_unsharded, step_of
from .manifest import missing_resume_state, saved_fingerprints, verify_checkpoint, write_manifest
from .run_lock import holding
from .signals import EndOnSignal, end_with_launcher


logger = get_logger(__name__)

# Folder of a checkpoint for a reference that moves with the policy
_REFERENCE = "ref_model"

# Where a checkpoint is until it is whole and before it is deleted, and there, the one whose place another takes
_PARTIAL = "_partial_checkpoint"
_REPLACED = "replaced"


class ResumingMixin(TrainerMixin):
    """
    Gives a trainer that samples completions checkpoints with its rollouts, written whole or not at all, also when it
    is asked to end.
    """

    _partial: Path | None = None  # where a checkpoint is being written
    _saved_classes: tuple[type, ...] = SAVED_CLASSES  # in the state of the rollouts
    _end_on_signal: EndOnSignal | None = None

    def _set_signals(self) -> None:
        """Puts our callback in the place of transformers', which saves where rollouts are ahead of the weights."""
        if self.args.enable_jit_checkpoint:
            self._end_on_signal = EndOnSignal(self._any_process)
            self.add_callback(self._end_on_signal)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Trains. With `enable_jit_checkpoint`, SIGTERM, SIGINT, SIGUSR1 or SIGHUP end it with a checkpoint after the
        current step. No other run can train in the same `output_dir` meanwhile.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of a checkpoint to go on from; `True` takes the newest in `output_dir` that is whole.
            args:
                Further arguments of [`~transformers.Trainer.train`].
            kwargs:
                The same, by name.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Number of steps, loss and metrics.

        Raises:
            `ValueError`: If files of the checkpoint are missing or damaged, or none is whole.
            `RuntimeError`: If another run trains in `output_dir`.
        """
        end_with_launcher()
        with ExitStack() as stack:
            holder = stack.enter_context(holding(self.args.output_dir)) if self.is_world_process_zero() else None
            (holder,) = broadcast_object_list([holder])
            if holder is not None:
                raise RuntimeError(
                    f"`output_dir` {self.args.output_dir!r} is in use by {holder}: two runs would delete each other's "
                    "checkpoints. Wait until it ends, or set another `output_dir`."
                )
            checkpoint = self._whole_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            if self._end_on_signal is not None:
                stack.enter_context(self._end_on_signal.listening())
            stack.callback(self._stream.close)
            return super().train(checkpoint, *args, **kwargs)

    def _whole_checkpoint(self, resume_from: str | Path | bool) -> str:
        """The checkpoint to go on from, the same on all processes."""
        folders = [str(resume_from)]
        if resume_from is True:
            folders = [str(path) for path in reversed(checkpoints(self.args.output_dir))]
            (folders,) = broadcast_object_list([folders])
        passed_over = []
        for folder in folders:
            found = self._verify_checkpoint(folder)
            if not found:
                self._warn_of_missing_state(folder)
                return folder
            passed_over.append(f"{folder} isn't whole: {'; '.join(found[:5])}{'; ...' if len(found) > 5 else ''}.")
            if resume_from is True:
                logger.warning(f"Passed over: {passed_over[-1]}")
        if resume_from is True:
            raise ValueError(" ".join([f"There is no whole checkpoint in {self.args.output_dir!r}.", *passed_over]))
        raise ValueError(
            f"{passed_over[0]} Resume from another one (`resume_from_checkpoint=True` finds the newest whole one in "
            "`output_dir`), or from what is left with `checkpoint_manifest=False`."
        )

    def _verify_checkpoint(self, folder: str) -> list[str]:
        """What is wrong with a checkpoint, told to all processes by those that save."""
        looks = self.args.checkpoint_manifest and self.args.should_save
        return list(dict.fromkeys(gather_object(verify_checkpoint(folder) if looks else [])))

    def _warn_of_missing_state(self, folder: str) -> None:
        if not (self.args.checkpoint_manifest and self.args.should_save):
            return
        lack = missing_resume_state(folder)
        if lack is not None:
            logger.warning(f"{folder} {lack}.")
        saved, now = saved_fingerprints(folder), self._fingerprints()
        for name in saved.keys() & now.keys():
            found = differences(saved[name], now[name])
            if found:
                logger.warning(
                    f"`{name}` has changed since {folder} was saved: {'; '.join(found)}. The run continues on other "
                    "data than an uninterrupted one would; pass the dataset as it was to resume exactly."
                )

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        """Fingerprints of the datasets that are trained on, by the names of their arguments."""
        return {"train_dataset": fingerprint(self.train_dataset, self.args.media_rules.media_dir)}

    def _rollout_state(self) -> dict[str, Any]:
        """What this process needs to go on in the middle of a generation batch as if it hadn't stopped."""
        reused = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        return {
            "batches": self._batches(),
            "step": self._step,
            "buffered_inputs": self._buffered_inputs if reused else None,
            "metrics": dict(self._metrics["train"]),
            "self_check": None if self.checks.self_check is None else asdict(self.checks.self_check),
            "fallbacks": asdict(self._policy.fallbacks),
            "checked": self._checked(),
            "n_skipped": self._n_skipped,
            "skipped_rows": self._stream.skipped,
        }

    def _checked(self) -> dict[str, Any]:
        """What the self-check's measurements hold for."""
        model = unwrapped(self.accelerator, self.model)
        return {
            "packing": self.args.packing,
            "precision": [self.accelerator.mixed_precision, str(model.dtype)],
            "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        }

    def _batches(self) -> dict[str, Any]:
        """What the size and the contents of a generation batch depend on."""
        args = self.args
        return {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "steps_per_generation": args.steps_per_generation,
            "num_generations": args.num_generations,
            "num_iterations": args.num_iterations,
            "num_processes": self.accelerator.num_processes,
            "reference": args.beta != 0,
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        """Restores what is the same on all processes, and a process's own completions if they still fit."""
        if state["batches"] == self._batches():
            self._step = state["step"]
            self._metrics["train"].update(state["metrics"])
            if state["buffered_inputs"] is not None:
                self._buffered_inputs = [each.to(self.accelerator.device) for each in state["buffered_inputs"]]
        else:
            logger.warning(
                f"Batches have changed from {state['batches']} to {self._batches()}, so the run goes on with new "
                "completions."
            )
        if state["checked"] == self._checked():  # else what this run does is measured anew
            self._policy.fallbacks = Fallbacks(**state["fallbacks"])
            if state["self_check"] is not None:
                measured: dict[str, Any] = {**state["self_check"], "fallbacks": self._policy.fallbacks}
                self.checks.self_check = SelfCheck(**measured)
        for batch in self._buffered_inputs or ():
            batch.packed = batch.packed and self._policy.fallbacks.packing
        self._n_skipped = state["n_skipped"]
        self._stream.skipped = state.get("skipped_rows", {})  # which an error of a server may not show again

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Saves the model and its processor. All processes have to call this.

        Args:
            output_dir (`str`, *optional*):
                Folder. Defaults to the `output_dir` of the config.

        Raises:
            `FloatingPointError`: If weights aren't finite. What the folder holds stays as it is.
        """
        self._check_weights(output_dir)
        super().save_model(output_dir, _internal_call)

    def _get_output_dir(self, trial):
        return super()._get_output_dir(trial) if self._partial is None else str(self._partial)

    def _save_checkpoint(self, model, trial):
        """
        Writes a checkpoint aside and moves it to its place when it is whole, and aside what is to be deleted, so that
        none is ever half there.
        """
        run_folder, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        partial = run_folder / _PARTIAL
        if self.args.should_save and not Path(self.args.output_dir).exists():
            logger.warning(
                f"`output_dir` {self.args.output_dir!r} was removed during the run, with the checkpoints in it; "
                f"{name} is saved to a new folder."
            )
        if self.args.should_save and partial.exists():  # from a run that was killed while it saved
            shutil.rmtree(partial)
        self.accelerator.wait_for_everyone()
        self._partial = partial
        with self._writing(run_folder / name):
            try:
                super()._save_checkpoint(model, trial)
                if not self.args.save_only_model:
                    self._save_beside_model(partial / name)
            finally:
                self._partial = None
            self.accelerator.wait_for_everyone()
            if self.state.best_model_checkpoint == str(partial / name):
                self.state.best_model_checkpoint = str(run_folder / name)
            if self.args.should_save:
                self.state.save_to_json(str(partial / name / TRAINER_STATE_NAME))
                if self.args.checkpoint_manifest:
                    write_manifest(partial / name, self.args.save_only_model, self._fingerprints())
        if self.args.should_save:
            if (run_folder / name).exists():
                (run_folder / name).rename(partial / _REPLACED)
            (partial / name).rename(run_folder / name)
            for checkpoint in self._surplus_checkpoints(run_folder / name):
                checkpoint.rename(partial / checkpoint.name)
            shutil.rmtree(partial, ignore_errors=True)  # what stays goes before the next is written
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_folder / name))

    @contextmanager
    def _writing(self, checkpoint: Path):
        """Errors within the context say which checkpoint they are about, and leave the disk to the older ones."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            # Those of `torch.save`
            of_file = ("inline_container", "Parent directory")
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in of_file):
                raise
            if not checkpoint.parent.exists():
                raise FileNotFoundError(
                    f"{str(checkpoint.parent)!r} was removed while {checkpoint.name} was written to it, with the "
                    "checkpoints in it. Restore it and resume with `resume_from_checkpoint=True`, or start again."
                ) from error
            free = shutil.disk_usage(checkpoint.parent).free / 2**20
            if self.args.should_save:
                shutil.rmtree(checkpoint.parent / _PARTIAL, ignore_errors=True)
            raise OSError(
                f"{checkpoint.name} can't be written to {str(checkpoint.parent)!r}, where {free:,.0f} MB are free: "
                f"{error}. Make room, for example with a lower `save_total_limit`, and go on with "
                "`resume_from_checkpoint=True`; the checkpoints before are as they were."
            ) from error

    def _surplus_checkpoints(self, newest: Path) -> list[Path]:
        """The checkpoints beyond `save_total_limit` after the newest was saved, in the order of their steps."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        # Times of folders mean nothing after a copy. Later steps than the newest are of a run before
        found = sorted(checkpoints(newest.parent), key=lambda each: step_of(each) <= step_of(newest))
        kept = {newest}
        if self.state.best_model_checkpoint is not None:
            kept.add(Path(self.state.best_model_checkpoint))
        surplus = max(0, len(found) - max(limit, len(kept)))
        deleted = [checkpoint for checkpoint in found if checkpoint not in kept][:surplus]
        if self._pushes and self._uploaded in deleted:
            deleted.remove(self._uploaded)  # the next time, as it is being read
        return deleted

    def _save_beside_model(self, folder: Path) -> None:
        """Adds to a checkpoint what TRL leaves out."""
        save_rollout_state(folder, self.accelerator.process_index, self._rollout_state())
        if self._reference_moves:
            save_unsharded(self.accelerator, self.ref_model, folder / _REFERENCE, self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference_moves:
            if not Path(checkpoint, _REFERENCE).is_dir():
                raise ValueError(
                    f"{checkpoint} has no folder {_REFERENCE!r} with a reference that follows the policy, so that "
                    "`sync_ref_model` would start again from the first one. Resume from a checkpoint that was saved "
                    "with it and without `save_only_model`, or set `sync_ref_model=False`."
                )
            load_unsharded(self.accelerator, self.ref_model, Path(checkpoint, _REFERENCE))
        # A process that the run before hadn't takes what is the same for all from the first
        indices, classes = (self.accelerator.process_index, 0), self._saved_classes
        state = next(filter(None, (load_rollout_state(checkpoint, index, classes) for index in indices)), None)
        if state is None:
            logger.warning(f"{checkpoint} has no state of the rollouts; the run goes on with new completions.")
        else:
            self._load_rollout_state(state)

    @property
    def _reference_moves(self) -> bool:
        return getattr(self.args, "sync_ref_model", False)

    def _init_training_state(self, max_steps, steps_per_epoch, n_epochs, *args):
        epochs_trained, steps_trained = super()._init_training_state(max_steps, steps_per_epoch, n_epochs, *args)
        if self.state.global_step >= max_steps:
            # Resumed after its last step, `Trainer` would go on to the end of the epoch, and stop one step too late
            return n_epochs, 0
        return epochs_trained, steps_trained

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not self._reload_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        self.sampler.invalidate_weights()
        if not self._reload_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _reload_weights(self, folder: str | Path) -> bool:
        """
        Loads weights where `Trainer` would load a state dict whose keys `save_pretrained` has renamed for many
        multimodal models, and restore nothing but a warning (huggingface/transformers#43701). `from_pretrained` knows
        the names. Whether it did.
        """
        if is_unsharded(self.accelerator) and not is_peft_model(self.accelerator.unwrap_model(self.model)):
            load_unsharded(self.accelerator, self.model, folder)
            return True
        return False
