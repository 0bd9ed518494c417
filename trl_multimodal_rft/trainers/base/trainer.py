# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Base of all trainers: the run from its first step or a checkpoint to its model card, and skipped updates."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import get_annotations
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, IntervalStrategy, SaveStrategy, has_length

from ...algorithms.metrics import average
from ...checks.run_checks import Checks
from ...data.rows.batches import Row
from ...data.rows.fingerprint import fingerprint
from ...forward.scores import DeferredParts
from ...forward.token_budget import backward_by_parts
from ...launchers import end_with_launcher, end_with_others, report_error
from ...models.critic import Critic, ValueHead, policy_alone
from ...models.parts import fix_frozen_batch_norms, freeze, rates_of_parts
from ...models.quantization import keep_differentiable
from ...models.wrapped import is_unsharded, unwrapped
from ...policy import PolicyForward
from ...reporting.card_notes import CardNotes
from ...reporting.console import PRINTERS, CompactLogCallback, console_of, show_parts
from ...reporting.events import ErrorCallback, EventPart
from ...reporting.hub import SaveBeforePush, is_running, warn_of_failures
from ...reporting.model_card import CardRun, in_code, training_lines, write_card
from ...rollout.ranks import any_rank
from ...rollout.row_pass import ReadRow, RowPass
from ...rollout.stream import RowStream, named_dataset
from ..checkpoints.checkpoints import Checkpoints
from ..checkpoints.files import PARTIAL, export_state, load_unsharded, save_without_weights
from ..checkpoints.lock import holding_lock
from ..checkpoints.shards import saving_whole_weights, writes_shards
from ..checkpoints.whole_step import WholeSteps, owes_evaluation
from .argument_checks import check_keywords
from .finite import check_weights, skip_broken_update
from .logs import LoggedTrainer
from .optimizer import check_rates, save_options_of_parts, split_groups_by_rate
from .signals import EndOnSignal


logger = get_logger(__name__)


class BaseTrainer(LoggedTrainer):
    """
    Trains, saves, resumes and publishes a run of TRL's trainers.

    [`~trainers.checkpoints.checkpoints.Checkpoints`] keeps the checkpoints. A resumed run equals the run without
    interruption, bit for bit. The run skips updates whose gradient isn't finite, and saves only finite weights.
    """

    # Before a trainer calls `_finish_setup`, it has to set the attributes that have no value here
    args: Any
    processing_class: Any
    accelerator: Any
    model: Any
    optimizer: Any
    ref_model: Any = None
    train_dataset: Any
    _policy: PolicyForward
    checks: Checks
    reward_func_names: Any = ()
    _max_skipped = 5  # limit on updates in a row that are skipped because their gradient isn't finite
    _stream: RowStream
    _train_loader: Callable[[], DataLoader]
    _eval_loader: Callable[..., DataLoader]
    card_notes: CardNotes
    _name: Any  # training method in the model card, set by TRL's trainers
    _paper: Any  # paper in the model card, set by TRL's trainers
    _tag_names: list[str]  # the second tag is the algorithm
    max_completion_length: Any
    chat_template_kwargs: Any
    in_flight: Any = None  # an [`~engines.in_flight.InFlight`], if `max_staleness` is set
    critic: Critic | ValueHead | None = None
    ema: Any = None  # a `MovingAverage` of the weights
    push_in_progress: Any = None  # a `PushInProgress` of checkpoints, on the main process
    _checkpoints: Checkpoints
    _row_pass: RowPass
    _whole_steps: WholeSteps
    _folders_of_model: tuple[str, ...] = ()  # folders in a checkpoint that are published with the policy
    _signal_callback: EndOnSignal | None = None
    _n_skipped = 0  # number of updates skipped in a row

    def __new__(cls, *args, **kwargs):
        check_keywords(cls, kwargs)
        end_with_launcher()  # also while the model loads
        end_with_others()
        return super().__new__(cls)

    def __repr__(self) -> str:
        model = getattr(self, "model", None)
        dataset = getattr(self, "train_dataset", None)
        if model is None or dataset is None:  # not constructed yet
            return object.__repr__(self)
        model = self._unwrapped(model)
        state = getattr(self, "state", None)
        steps = self.args.max_steps if self.args.max_steps > 0 else getattr(state, "max_steps", 0)
        facts = {
            "model": " ".join([type(model).__name__, *filter(None, [model.config.name_or_path])]),
            "rows": f"{len(dataset):,}" if has_length(dataset) else "a stream",
            "rewards": ", ".join(self.reward_func_names),
            "steps": f"{steps:,}" if steps else f"{self.args.num_train_epochs:g} epochs",
        }
        return f"{type(self).__name__}({'; '.join(f'{name}: {fact}' for name, fact in facts.items() if fact)})"

    def _finish_setup(self) -> None:
        """
        Prepares the model, and adds callbacks that restore state, save, log, and end on signals, in place of
        transformers', which doesn't wait for the end of the step. Raises a `TypeError` for a missing attribute of the
        trainer.
        """
        self._checkpoints = Checkpoints(self.args, self.accelerator, self._tag_names[1])
        self._row_pass = RowPass(self.accelerator, self._row_readers)
        self._whole_steps = WholeSteps(self.accelerator, self._rollout_state)
        missing = [name for name in get_annotations(BaseTrainer) if not hasattr(self, name)]
        if missing:
            raise TypeError(f"{type(self).__name__} has no {', '.join(missing)}; set it before `_finish_setup`.")
        keep_differentiable(self.model)
        self.add_callback(_RestoreState(self._checkpoints, self._load_state))
        self.add_callback(SaveBeforePush(self._save_before_first_push))
        self.add_callback(self._row_pass)
        if console_of(self.callback_handler.callbacks) is None:
            self.add_callback(CompactLogCallback())
        self.add_callback(self._whole_steps)
        if self.args.enable_jit_checkpoint or self.args.save_strategy != SaveStrategy.NO:
            raises = not self.args.enable_jit_checkpoint
            self._signal_callback = EndOnSignal(partial(any_rank, self.accelerator), raises)
            self.add_callback(self._signal_callback)

    def _unwrapped(self, model: nn.Module) -> PreTrainedModel:
        return unwrapped(self.accelerator, model)

    def _save_before_first_push(self) -> None:
        """Saves the model and its card before the first push, in case the Hub refuses to create the repository."""
        if self.hub_model_id is None:
            self.save_model(_internal_call=True)
            self.create_model_card()

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Trains the model. During training, no other run can train in the same `output_dir`.

        Ctrl-C, SIGTERM and SIGHUP save a checkpoint after the current step and then raise `KeyboardInterrupt`, whose
        message names the checkpoint. A second Ctrl-C raises the error at once. In an interactive session, or with
        `save_strategy="no"`, the signals act as without a trainer. So do SIGTERM and SIGHUP if the program handles
        them. With `enable_jit_checkpoint`, SIGTERM, SIGINT, SIGUSR1 or SIGHUP end the run with a checkpoint after the
        current step, without an error.

        An error in a step, such as of a reward function or of a file that is gone, saves a checkpoint of the last
        whole step, unless `save_strategy="no"`. A note of the error names it. After an error in the update itself, and
        with several processes, the note names the last checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of a checkpoint to resume from. `True` takes the newest whole checkpoint in `output_dir`.
            args:
                Further arguments of [`~transformers.Trainer.train`].
            kwargs:
                Further keyword arguments of [`~transformers.Trainer.train`].

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Number of steps, loss and metrics.

        Raises:
            `ValueError`: If no checkpoint is whole, or if the run that saved the checkpoint had another trainer, other
                sharding (FSDP, DeepSpeed), other `freeze` or `learning_rates`, or if only one of both runs has an
                adapter.
            `RuntimeError`: If another run trains in `output_dir`.
            `KeyboardInterrupt`: At Ctrl-C, SIGTERM or SIGHUP, after a checkpoint.
        """
        with ExitStack() as stack:
            stack.push(report_error)  # with the notes that the functions below add
            holder = stack.enter_context(holding_lock(self.args.output_dir)) if self.is_world_process_zero() else None
            (holder,) = broadcast_object_list([holder])
            if holder is not None:
                raise RuntimeError(
                    f"`output_dir` {self.args.output_dir!r} is in use by {holder}: two runs would delete each other's "
                    "checkpoints. Wait until it ends, or set another `output_dir`."
                )
            checkpoint = None
            if resume_from_checkpoint:
                has_adapter = is_peft_model(self.model)
                checkpoint = self._checkpoints.verify(resume_from_checkpoint, self._fingerprints, has_adapter)
            self._checkpoints.resumed_from = checkpoint
            self._check_best_metric()
            # Parameters may have been frozen since the constructor
            fix_frozen_batch_norms(self.model)
            if self._signal_callback is not None:
                stack.enter_context(self._signal_callback.handling_signals())
            # When the run ends, also by an error, the stack calls the following functions, the last one first
            stack.push(self._tell_callbacks_of_error)
            stack.callback(self._stream.close)
            stack.callback(self._row_pass.close)
            stack.callback(lambda: self.in_flight and self.in_flight.clear())
            self._invalidate_engine()
            console = console_of(self.callback_handler.callbacks)
            if console is not None:
                console.begin(type(self).__name__)
                stack.callback(console.end)
                # One log on the console is enough
                surplus = [log for log in self.callback_handler.callbacks if isinstance(log, CompactLogCallback)][1:]
                for printer in (*PRINTERS, *surplus):
                    self.remove_callback(printer)
            self._whole_steps.begin(self.args, checkpoint)
            stack.push(self._save_last_step)
            return super().train(checkpoint, *args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        self._whole_steps.begin_step(self.state)
        return super().get_batch_samples(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if owes_evaluation(self.state) and self.args.eval_strategy != IntervalStrategy.NO:
            if self._determine_best_metric(self._evaluate(None, None), trial=None):
                self.state.best_model_checkpoint = checkpoint

    def _save_last_step(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.control.should_log:  # the error is before the log of the step, so the next log must not have it
            self._metric_log.pop("train")
            self._metrics["train"].clear()
        save = partial(self._save_checkpoint, self.model, trial=None)
        self._whole_steps.save_last(error, self.args, self.state, self.control, save)

    def _tell_callbacks_of_error(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for callback in self.callback_handler.callbacks:
            if error is not None and isinstance(callback, ErrorCallback):
                callback.on_error(self.args, self.state, self.control)

    def _invalidate_engine(self) -> None:
        """Makes an engine load the weights again before it samples. By default, does nothing: there is no engine."""

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        return {"train_dataset": fingerprint(self.train_dataset, self.args.rules.media_dir)}

    def _row_readers(self) -> dict[str, tuple[Any, ReadRow]]:
        """Returns, by the name of an argument, datasets and the function that reads a row of them without media."""
        datasets = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        return {name: (dataset, self._read_row) for name, dataset in datasets.items()}

    def _read_row(self, row: Row) -> list:
        raise NotImplementedError

    def get_train_dataloader(self):
        return self._train_loader()

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = named_dataset(self.eval_dataset, eval_dataset)
        return self._eval_loader(dataset, is_argument=dataset is eval_dataset)

    def create_optimizer(self, model=None):
        is_new_optimizer = self.optimizer is None
        freeze(self.model, self.args.freeze)  # loading or enabling an adapter makes all its weights trainable
        optimizer = super().create_optimizer(model)
        check_rates(optimizer, self.lr_scheduler, self.args)
        self._group_parameters(is_new_optimizer)
        if is_new_optimizer and (self.args.freeze or self.args.learning_rates):
            if self.is_world_process_zero() and console_of(self.callback_handler.callbacks) is None:
                show_parts(self.model, rates_of_parts(self.model, self.args))
        return optimizer

    def _group_parameters(self, is_new_optimizer: bool) -> None:
        """Splits an optimizer's parameter groups by `learning_rates`, if the trainer made the optimizer."""
        if is_new_optimizer and self.args.learning_rates:
            split_groups_by_rate(self.model, self.optimizer, self.args)

    def _init_training_state(self, max_steps, steps_per_epoch, n_epochs, *args):
        epochs_trained, steps_trained = super()._init_training_state(max_steps, steps_per_epoch, n_epochs, *args)
        if self.state.global_step >= max_steps:
            # A run resumed after its last step would go on towards the end of the epoch, and stop one step too late
            return n_epochs, 0
        return epochs_trained, steps_trained

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not self._reload_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        self._invalidate_engine()
        if not self._reload_weights(str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _reload_weights(self, folder: str | Path) -> bool:
        """
        Loads unsharded weights by `from_pretrained`, and returns whether it did. `save_pretrained` renames keys of
        many multimodal models, and `Trainer` would load by the old names, and only warn
        (huggingface/transformers#43701).
        """
        if not is_unsharded(self.accelerator):
            return False
        self._load_parts(Path(folder))
        policy = policy_alone(self.accelerator.unwrap_model(self.model))
        if is_peft_model(policy):
            return False
        load_unsharded(self.accelerator, policy, folder)
        return True

    def _load_parts(self, folder: Path) -> None:
        """
        Loads the files that [`_save_parts`] saved, by default none. Isn't called with sharded weights, which FSDP or
        DeepSpeed restores.
        """

    def _load_state(self, folder: Path) -> None:
        """All ranks must call this."""
        state = self._checkpoints.load_state(folder, self.model, self.ref_model, self.ema)
        if state is not None:
            self._load_rollout_state(state)

    # State of the rollouts

    def _rollout_state(self) -> dict[str, Any]:
        return {
            "metrics": self._metric_log.state_dict(),
            "metrics_of_trl": {name: list(numbers) for name, numbers in self._metrics["train"].items()},
            **self.checks.state_dict(),
            "checked": self._checked_settings(),  # settings of the self-check's measurements
            "n_skipped": self._n_skipped,
            "rows": self._stream.state_dict(),
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        self._metric_log.load_state_dict(state["metrics"])
        self._metrics["train"].clear()
        self._metrics["train"].update(state.get("metrics_of_trl", {}))  # earlier checkpoints have none
        if state["checked"] == self._checked_settings():  # with other settings, the self-check runs anew
            self.checks.load_state_dict(state)
        self._n_skipped = state["n_skipped"]
        self._stream.load_state_dict(state["rows"])

    def _checked_settings(self) -> dict[str, Any]:
        """The self-check's measurements are valid under these settings."""
        model = self._policy.unwrapped(self.model)
        return {
            "packing": self.args.packing,
            "precision": [self.accelerator.mixed_precision, str(model.dtype)],
            "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        }

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Saves the model and its processor, with whole weights even if FSDP or DeepSpeed shards them. All ranks must
        call this. In a checkpoint of shards, `Trainer` saves the weights later, together with the optimizer's state.

        Args:
            output_dir (`str`, *optional*):
                Folder. Defaults to the `output_dir` of the config.

        Raises:
            `FloatingPointError`: If weights aren't finite. The folder then stays as it is.
        """
        folder = Path(output_dir or self.args.output_dir)
        consequence = f"the model isn't saved in {str(folder)!r}; what is saved there stays"
        check_weights(self.model, self.accelerator, self.state.global_step, consequence)
        args = self.args
        in_checkpoint = output_dir is not None and _internal_call
        # `from_pretrained` can't read shards, so a checkpoint of the model alone, or one that is published, has whole
        # weights. For other checkpoints, `Trainer` later writes the shards of model and optimizer
        needs_whole_weights = args.save_only_model or (args.push_to_hub and args.hub_strategy != HubStrategy.END)
        is_checkpoint = folder.parent.name == PARTIAL  # other internal calls save models outside of checkpoints
        if is_checkpoint and writes_shards(self.accelerator) and not needs_whole_weights:
            save_without_weights(self.accelerator, self.model, self.processing_class, folder, args.should_save)
            return
        with saving_whole_weights(self.accelerator):
            self._save_parts(folder, in_checkpoint)
            super().save_model(output_dir, _internal_call)

    def _save_parts(self, folder: Path, in_checkpoint: bool) -> None:
        """Saves files of the model in addition to the policy's, by default none. All ranks must call this."""

    def _save_checkpoint(self, model, trial):
        """
        Saves a checkpoint, see [`~trainers.checkpoints.checkpoints.Checkpoints.save`]. TRL's and transformers' methods
        would write in place, and publish checkpoints that aren't whole yet.
        """
        target = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._checkpoints.begin(target)
        if trial is None:
            self.store_flos()
        self.create_model_card(model_name=Path(self.args.hub_model_id or self.args.output_dir).name)
        write = partial(self._write_checkpoint, target=target)
        self._checkpoints.save(target, write, self.state, self.push_in_progress)
        if self.args.push_to_hub:
            self._publish_checkpoint(target)

    def _write_checkpoint(self, folder: Path, target: Path) -> None:
        args = self.args
        state = self.state
        self.save_model(str(folder), _internal_call=True)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(target)
        if not args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
            self._save_state(folder)
            if args.should_save:
                save_options_of_parts(folder, args)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            export_state(state.stateful_callbacks, [*self.callback_handler.callbacks, self.control])
            state.save_to_json(str(folder / TRAINER_STATE_NAME))
            if getattr(self, "use_adaptive_entropy", False):  # read by TRL's `_load_optimizer_and_scheduler`
                entropy = {"entropy_coef": self.entropy_coef, "last_world_entropy": self._last_world_entropy}
                (folder / "entropy_ctrl_state.json").write_text(json.dumps(entropy))
        self._checkpoints.seal(folder, self._fingerprints)

    def _save_state(self, folder: Path) -> None:
        """All ranks must call this."""
        self._checkpoints.save_state(folder, self._whole_steps.rollouts(), self.ref_model, self.ema)

    # Publishing

    def _publish_checkpoint(self, folder: Path) -> None:
        """Pushes a whole checkpoint by transformers. Without `hub_always_push`, does nothing during another push."""
        args = self.args
        if args.hub_strategy == HubStrategy.END or not self.is_world_process_zero():
            return
        if is_running(self.push_in_progress):
            if not args.hub_always_push:
                return
            self._finish_current_push()  # the current push uploads files that would change now
        for name in self._folders_of_model:
            if (folder / name).is_dir():
                shutil.copytree(folder / name, Path(args.output_dir, name), dirs_exist_ok=True)
        self._push_from_checkpoint(str(folder))
        self._checkpoints.pushed = folder
        warn_of_failures(self.push_in_progress.jobs, folder)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """
        Writes a model card with the data and the settings of the training, and with an example of inference on media.
        If a resumed run has no step left, it has read no row, and leaves the card as it is.

        Args:
            model_name (`str`, *optional*):
                Name of the model.
            dataset_name (`str`, *optional*):
                Name of the dataset.
            tags (`str` or `list[str]`, *optional*):
                Tags in addition to the package's.
        """
        has_card = Path(self.args.output_dir, "README.md").exists()
        if self._checkpoints.resumed_from and not self.card_notes.columns and has_card:
            return
        tags = {tags} if isinstance(tags, str) else set(tags or ())
        super().create_model_card(model_name, dataset_name, sorted(tags | self.card_notes.modalities))
        if self.is_world_process_zero():
            model = self.accelerator.unwrap_model(self.model)
            repository = self.hub_model_id or self.args.output_dir
            run = CardRun(
                self.args,
                self.state,
                model,
                self.processing_class,
                self.card_notes,
                self._name,
                self._paper,
                repository,
                self.max_completion_length,
                self.chat_template_kwargs,
                self._training_lines(),
                self._published_folders(type(self._unwrapped(model)).__name__, repository),
                self.checks.self_check,
            )
            write_card(run, model_name, dataset_name)

    def _training_lines(self) -> list[tuple[str, str]]:
        return [*training_lines(self.args.to_dict()), ("Rewards", ", ".join(map(in_code, self.reward_func_names)))]

    def _published_folders(self, model_class: str, repository: str) -> list[tuple[str, str]]:
        """Returns folders that are published with the policy, and their descriptions for the model card."""
        return []

    # Updates

    def _backward_by_parts(
        self, model: nn.Module, loss: torch.Tensor, deferred: DeferredParts, divisor: int
    ) -> torch.Tensor:
        self._metric_log.add(deferred.metrics)
        return backward_by_parts(self.accelerator, model, loss, deferred, divisor)

    def _get_grad_norm(self, model, grad_norm=None):
        """Skips the update if the gradient isn't finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        is_skipped, self._n_skipped = skip_broken_update(
            norm, self.optimizer, self.accelerator, self.state.global_step, self._n_skipped, limit=self._max_skipped
        )
        self._metric_log.add({"skipped_updates": average(is_skipped)}, mode="train")
        return norm


class _RestoreState(TrainerCallback):
    """Callback that restores the rest of a run's state, after transformers has restored optimizer and schedule."""

    def __init__(self, checkpoints: Checkpoints, load: Callable[[Path], None]):
        self.checkpoints = checkpoints
        self.load = load

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: EventPart,
    ):
        folder = self.checkpoints.resumed_from
        if folder is not None:
            # Before transformers 5.17, `Trainer` doesn't set the epoch of a loader that skips batches
            set_epoch = getattr(train_dataloader.batch_sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(int(state.epoch))
            self.load(Path(folder))
