# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Signals that end a run after a checkpoint."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...launchers import another_failed
from ...reporting.events import EventPart


logger = get_logger(__name__)

# Signals that end a run, if the system has them. Schedulers send SIGTERM or SIGUSR1, and a terminal sends SIGHUP when
# it is closed
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)]
# Programs may use SIGUSR1 for something else, so it ends a run on request only
_ENDING = [signum for signum in _SIGNALS if signum.name != "SIGUSR1"]
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

_MESSAGE = (
    b"\nThis run saves a checkpoint after its current step, and ends; `resume_from_checkpoint=True` resumes it."
    b" Ctrl-C now ends it at once, without a checkpoint.\n"
)


_replaced: list[Any] = []  # the program's handler of SIGTERM, while a run handles the signal


def _block_before_fork() -> None:
    if _replaced:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_after_fork() -> None:
    if _replaced:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _restore_after_fork() -> None:
    """Lets SIGTERM end a forked process, such as one of a reward function that `terminate` ends."""
    if _replaced:
        signal.signal(signal.SIGTERM, _replaced.pop())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# Python forgets signals that reach a new process before its first instruction, so SIGTERM waits until then
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_restore_after_fork
    )


class EndOnSignal(TrainerCallback):
    """
    Callback that ends a run with a checkpoint on SIGTERM, SIGHUP or SIGINT, or SIGUSR1, after the step in which any
    process got it, as weights and rollouts match only between steps. A later SIGINT ends it at once; repeats of others
    do nothing. With `raises`, `KeyboardInterrupt` follows, and SIGUSR1 and handled signals are left alone.
    """

    def __init__(self, any_process: Callable[[bool], bool], raises: bool = False):
        self._any_process = any_process
        self._raises = raises
        self._has_signal = self._has_interrupt = False  # on this process
        # Whether the run ends after the current step, and whether a checkpoint of this step exists
        self._ends_run = self._has_saved = False
        self._progress = "before the first step"  # the last step, and its checkpoint

    @contextmanager
    def handling_signals(self):
        """
        Handles the signals within the context. In an interactive session of Python, leaves SIGINT alone, so that the
        user can look at the state of the interrupted run, and any signal after which `train` would raise.
        """
        self._has_signal = self._has_interrupt = self._ends_run = self._has_saved = False
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        signals = _ENDING if self._raises else _SIGNALS
        if is_interactive:
            signals = [] if self._raises else [signum for signum in signals if signum != signal.SIGINT]
        if threading.current_thread() is not threading.main_thread():
            if not self._raises:
                logger.warning("`enable_jit_checkpoint` has no effect: signals only reach Python's main thread.")
            signals = []
        # `None` stands for a handler that Python didn't install
        handlers = {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in signals}
        # Ignored signals stay ignored, such as SIGHUP after `nohup`
        handlers = {
            signum: handler
            for signum, handler in handlers.items()
            if handler != signal.SIG_IGN and (not self._raises or signum == signal.SIGINT or handler in _DEFAULTS)
        }
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        parent_id = os.getppid()

        def handle(signum: int, frame: FrameType | None):
            if signum == signal.SIGTERM and another_failed():  # no step ends any more
                sys.exit(1)
            # At a second Ctrl-C, torch's launcher sends SIGTERM. The kernel does, too, when a launcher ends at Ctrl-C
            if signum == signal.SIGTERM and self._has_interrupt and os.getppid() == parent_id:
                signal.signal(signum, handlers[signum])
                signal.raise_signal(signum)
                return
            self._has_signal = True
            self._has_interrupt = self._has_interrupt or signum == signal.SIGINT
            if signal.SIGINT in handlers:  # so that a second one ends the run at once
                signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            for descriptor in terminals:
                if not os.isatty(descriptor):  # closed, so that printing would raise an error
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            os.write(2, _MESSAGE)  # no `print`, as the signal may have interrupted one

        for signum in handlers:
            signal.signal(signum, handle)
        _replaced[:] = [handlers[signal.SIGTERM]] if signal.SIGTERM in handlers else []
        try:
            yield
        finally:
            _replaced.clear()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        if self._raises and (self._ends_run or self._has_signal):  # a signal may come after the last step
            raise KeyboardInterrupt(f"A signal ended the run {self._progress}.")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._ends_run = self._any_process(self._has_signal)
        self._has_saved = False
        self._progress = f"after step {state.global_step} of {state.max_steps}"
        if self._ends_run:
            logger.warning(f"The run received a signal and ends {self._progress}.")
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._has_saved = True
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        self._progress = f"after step {state.global_step} of {state.max_steps}; resume from {folder}"

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        if self._ends_run:
            # `Trainer` also calls this method when it stops within an epoch, where no log or evaluation is due
            if state.epoch % 1 != 0:
                control.should_log = control.should_evaluate = False
            control.should_save = control.should_evaluate or not self._has_saved
