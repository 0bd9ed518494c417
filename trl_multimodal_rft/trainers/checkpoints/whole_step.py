# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The state of a run after its last whole step, for a checkpoint after an error in the next step."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ...reporting.events import EventPart
from .files import step_of


@dataclass(frozen=True)
class WholeStep:
    """What a step changes before its update. Weights and optimizer change only in the update."""

    n_steps: int  # of the run
    n_tokens: int  # `num_input_tokens_seen` of the state
    rollouts: dict[str, Any]  # state of the rollouts
    generators: dict[str, Any]  # states of the generators of random numbers

    @classmethod
    def of(cls, state: TrainerState, rollouts: dict[str, Any]) -> "WholeStep":
        """Returns the state between two steps. Tensors aren't copied, since no step changes them in place."""
        return cls(state.global_step, state.num_input_tokens_seen, _copied(rollouts), _generators())

    def restore(self, state: TrainerState) -> None:
        """Restores what `Trainer` saves itself."""
        state.num_input_tokens_seen = self.n_tokens
        _restore(self.generators)


def _generators() -> dict[str, Any]:
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        generators["device"] = torch.get_device_module().get_rng_state()
    return generators


def _restore(generators: dict[str, Any]) -> None:
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["cpu"])
    if "device" in generators:
        torch.get_device_module().set_rng_state(generators["device"])


def owes_evaluation(state: TrainerState) -> bool:
    """Returns whether the run that saved the state ended in the evaluation after its last step."""
    states: Any = state.stateful_callbacks  # a file's, by the name of the class
    return states.get("TrainerControl", {}).get("args", {}).get("should_evaluate", False)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return copy.copy(value) if is_dataclass(value) or isinstance(value, set) else value


class WholeSteps(TrainerCallback):
    """
    Callback that keeps the state before the current step, so that an error in the step costs this step alone.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        rollout_state (`Callable[[], dict]`):
            Function that returns the current state of the rollouts.
    """

    def __init__(self, accelerator: Accelerator, rollout_state: Callable[[], dict[str, Any]]):
        self._accelerator = accelerator
        self._rollout_state = rollout_state
        self._can_save = False  # whether an error in this run may be followed by a checkpoint
        self._before: WholeStep | None = None  # the current step
        self._lost: WholeStep | None = None  # before the step that an error ended
        self._updated_generators: dict[str, Any] = {}  # after the last update, before an evaluation that may sample
        self._begun = -1  # the last step that `begin_step` has begun; LightRFT's `fit` saves between rollouts alone
        self._updated = -1  # step whose update has begun, after which an error leaves weights half updated
        self._last_checkpoint: Path | None = None  # that the run saved, or from which it resumed

    def begin(self, args: TrainingArguments, resumed_from: str | None) -> None:
        """Is called before a run."""
        # Other processes may wait for the one with the error, and DeepSpeed updates weights within the backward pass
        is_alone = self._accelerator.num_processes == 1
        has_parts = self._accelerator.distributed_type == DistributedType.DEEPSPEED
        self._can_save = is_alone and not has_parts and args.save_strategy != SaveStrategy.NO
        self._before = self._lost = None
        self._begun = self._updated = -1
        self._last_checkpoint = None if resumed_from is None else Path(resumed_from)

    def begin_step(self, state: TrainerState) -> None:
        """Is called before the rows of a step are read."""
        if not self._can_save:
            return
        self._begun = state.global_step
        # At the start of an epoch, the loader draws a random number before, and again when a run resumes
        if self._before is None or self._before.n_steps != state.global_step:
            self._before = WholeStep.of(state, self._rollout_state())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart
    ):
        if self._can_save:
            self._before = WholeStep.of(state, self._rollout_state())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart
    ):
        self._updated = state.global_step

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart
    ):
        if self._can_save:
            self._updated_generators = _generators()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._last_checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def rollouts(self) -> dict[str, Any]:
        """Returns the state of the rollouts for a checkpoint: the current one, or that before a step that is lost."""
        return self._rollout_state() if self._lost is None else self._lost.rollouts

    def save_last(
        self,
        error: BaseException | None,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        save: Callable[[], None],
    ) -> None:
        """
        Lets `save` save the last whole step of a run that an error ended, and adds a note with the last checkpoint to
        the error. Saves nothing after half an update, and where [`begin`] says so.
        """
        if not isinstance(error, Exception) or args.save_strategy == SaveStrategy.NO:
            return
        step = state.global_step
        saved_step = 0 if self._last_checkpoint is None else step_of(self._last_checkpoint)
        is_whole = self._begun in (step - 1, step) and self._updated != step
        problem = ""
        if step > saved_step and is_whole:
            if self._before is not None and self._before.n_steps == step:
                self._lost = self._before
                self._lost.restore(state)
            elif control.should_evaluate and self._updated_generators:
                _restore(self._updated_generators)  # a resumed run evaluates first
            try:
                save()
                self._last_checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")
            except Exception as failure:
                problem = f"Step {step} couldn't be saved, either: {str(failure).splitlines()[0]} "
        if self._last_checkpoint is not None:
            problem += f"The last checkpoint is {self._last_checkpoint}; `resume_from_checkpoint=True` resumes it."
        if problem:
            error.add_note(problem.strip())
