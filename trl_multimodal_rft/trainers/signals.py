# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run that receives a signal to end saves a checkpoint first; it also ends when its launcher is gone."""

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

# Those that ask a run to end, as far as the system has them: Slurm sends SIGUSR1, a terminal that closes SIGHUP
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)]

_MESSAGE = (
    b"\nThis run saves a checkpoint after its current step, and ends; `resume_from_checkpoint=True` resumes it.\n"
)

# Programs, or modules of Python, that start processes and wait for them
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
    Ends a run on SIGTERM, SIGUSR1, SIGHUP or SIGINT with a checkpoint, at the end of the optimizer step in which any
    of its processes got the signal: only then weights, optimizer and rollouts are of the same moment. A second SIGINT
    ends at once; others don't, since launchers pass on what their processes got already.
    """

    def __init__(self, any_process: Callable[[bool], bool]):
        self._any_process = any_process
        self._has_signal = False  # on this process
        self._ends = self._saved = False

    @contextmanager
    def listening(self):
        """Takes the signals within the context, but SIGINT not from who types at a prompt of Python."""
        self._has_signal = self._ends = self._saved = False
        typed_at = hasattr(sys, "ps1") or sys.flags.interactive
        wanted = [each for each in _SIGNALS if each != signal.SIGINT or not typed_at]
        if threading.current_thread() is not threading.main_thread():
            logger.warning("`enable_jit_checkpoint` has no effect: signals only reach Python's main thread.")
            wanted = []
        before = {each: signal.getsignal(each) or signal.SIG_DFL for each in wanted}  # `None` is none of Python's
        before = {each: handler for each, handler in before.items() if handler != signal.SIG_IGN}  # as after `nohup`

        terminals = [output for output in (1, 2) if os.isatty(output)]

        def ask(number: int, frame: FrameType | None):
            self._has_signal = True
            if number == signal.SIGINT:
                signal.signal(number, before[number])
            for output in terminals:
                if not os.isatty(output):  # closed, so that whatever is printed would be an error
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            os.write(2, _MESSAGE)  # `print` may be busy

        for each in before:
            signal.signal(each, ask)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._ends, self._saved = self._any_process(self._has_signal), False
        if self._ends:
            logger.warning(f"The run received a signal and ends after step {state.global_step} of {state.max_steps}.")
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        self._saved = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        if self._ends:
            if state.epoch % 1 != 0:  # `Trainer` gets here from within an epoch, too
                control.should_log = control.should_evaluate = False
            control.should_save = control.should_evaluate or not self._saved


def end_with_launcher() -> None:
    """
    Lets this process get SIGTERM when a launcher that started it has ended, however it has. Where a launcher is
    killed, nothing else stops the processes, and they would continue. Has an effect on Linux only.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # no Linux, or a parent that can't be seen from here
        return
    words = parent.decode(errors="replace").split("\0")
    if {Path(word).name for word in words[:3]} & _LAUNCHERS:  # what follows may be anybody's
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
