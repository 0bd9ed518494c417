# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Signals that end a run after a checkpoint. The kernel sends one of them when the launcher is gone."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from accelerate.logging import get_logger
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyrefly: ignore[missing-module-attribute]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..reporting.events import EventPart


logger = get_logger(__name__)

# Signals that end a run, if the system has them. Slurm sends SIGUSR1, and a terminal sends SIGHUP when it is closed
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)]

_MESSAGE = (
    b"\nThis run saves a checkpoint after its current step, and ends; `resume_from_checkpoint=True` resumes it."
    b" Ctrl-C now ends it at once, without a checkpoint.\n"
)

# Programs and Python modules that start processes and wait for them
_LAUNCHERS = {
    "trl-multimodal-rft",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
}


class EndOnSignal(TrainerCallback):
    """
    Callback that ends a run with a checkpoint on SIGTERM, SIGUSR1, SIGHUP or SIGINT.

    The run ends after the optimizer step in which any process got the signal, since weights, optimizer and rollouts
    match only between steps. A second SIGINT ends the run at once. Repeats of other signals change nothing, since
    launchers repeat signals.

    Args:
        any_process (`Callable[[bool], bool]`):
            Function that returns whether a condition holds on any process.
        only_interrupts (`bool`, *optional*, defaults to `False`):
            Whether to handle SIGINT alone. All processes then raise `KeyboardInterrupt` after the checkpoint, so that
            a script doesn't continue after `train`.
    """

    def __init__(self, any_process: Callable[[bool], bool], only_interrupts: bool = False):
        self._any_process, self._only_interrupts = any_process, only_interrupts
        self._has_signal = False  # on this process
        # Whether the run ends after the current step, and whether a checkpoint of this step exists
        self._ends_run = self._has_saved = False

    @contextmanager
    def handling_signals(self):
        """
        Handles the signals within the context. In an interactive session of Python, leaves SIGINT alone, so that the
        user can look at the state of the interrupted run.
        """
        self._has_signal = self._ends_run = self._has_saved = False
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        signals = [signal.SIGINT] if self._only_interrupts else _SIGNALS
        signals = [signum for signum in signals if signum != signal.SIGINT or not is_interactive]
        if threading.current_thread() is not threading.main_thread():
            if not self._only_interrupts:
                logger.warning("`enable_jit_checkpoint` has no effect: signals only reach Python's main thread.")
            signals = []
        # `None` stands for a handler that Python didn't install
        handlers = {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in signals}
        # Ignored signals stay ignored, such as SIGHUP after `nohup`
        handlers = {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

        def handle(signum: int, frame: FrameType | None):
            self._has_signal = True
            if signum == signal.SIGINT:  # so that a second one ends the run at once
                signal.signal(signum, handlers[signum])
            for descriptor in terminals:
                if not os.isatty(descriptor):  # closed, so that printing would raise an error
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            os.write(2, _MESSAGE)  # no `print`, as the signal may have interrupted one

        for signum in handlers:
            signal.signal(signum, handle)
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        if self._only_interrupts and (self._ends_run or self._has_signal):  # a signal may come after the last step
            raise KeyboardInterrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._ends_run, self._has_saved = self._any_process(self._has_signal), False
        if self._ends_run:
            logger.warning(f"The run received a signal and ends after step {state.global_step} of {state.max_steps}.")
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._has_saved = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        if self._ends_run:
            # `Trainer` also calls this method when it stops within an epoch, where no log or evaluation is due
            if state.epoch % 1 != 0:
                control.should_log = control.should_evaluate = False
            control.should_save = control.should_evaluate or not self._has_saved


def end_with_launcher() -> None:
    """
    Makes this process receive SIGTERM when the launcher that started it ends for any reason. If a launcher is killed,
    nothing else stops its processes, and they would continue. Has an effect on Linux only.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # not Linux, or a parent that this process can't see
        return
    words = parent.decode(errors="replace").split("\0")
    if {Path(word).name for word in words[:3]} & _LAUNCHERS:  # later words may be arguments
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
