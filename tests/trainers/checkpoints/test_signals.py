# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Signals end a run, which first completes its remaining work. `distributed/test_killed.py` resumes such runs bit for
bit, from any moment and on several processes.
"""

import fcntl
import logging
import multiprocessing
import os
import platform
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
import torch
from helpers import forked
from helpers.processes import PATIENCE, python_command, python_environment
from helpers.resumed_runs import REUSED, STEPS_PER_EPOCH, logged, same_weights
from helpers.trainer_utils import image_rows, make_trainer
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer, launchers
from trl_multimodal_rft.trainers.base import trainer as trainer_module
from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


class Interrupted(MultimodalGRPOTrainer):
    """Receives signals before the update of a step."""

    step = -1
    numbers = (signal.SIGTERM,)

    def _get_grad_norm(self, *args, **kwargs):
        for number in self.numbers if self.state.global_step + 1 == self.step else ():
            signal.raise_signal(number)
        return super()._get_grad_norm(*args, **kwargs)


def make(folder: Path, step: int = -1, *numbers: int, **options):
    options = {**REUSED, "self_check": False, "enable_jit_checkpoint": True, "save_strategy": "no", **options}
    trainer = make_trainer(Interrupted, "qwen2_5_vl", image_rows(5), folder, **options)
    trainer.step = step
    trainer.numbers = numbers or (signal.SIGTERM,)
    return trainer


ASKING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


class Unhandled(Exception):
    pass


@pytest.fixture(autouse=True)
def outside():
    """Handlers of the surrounding program, which a run must restore."""

    def raise_error(number, frame):
        raise Unhandled(number)

    before = {number: signal.signal(number, raise_error) for number in (*ASKING, signal.SIGINT)}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert set(after.values()) == {raise_error}


EVALUATED = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4, "num_generations_eval": 2}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    options = {**EVALUATED, "objects": {"eval_dataset": image_rows(3)}}
    trainer = make(tmp_path_factory.mktemp("straight"), enable_jit_checkpoint=False, **options)
    trainer.train()
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 2
    return trainer


@pytest.mark.parametrize(
    ("step", "save_strategy"),
    [
        (2, "no"),
        (STEPS_PER_EPOCH, "epoch"),
        pytest.param(2, "epoch", marks=pytest.mark.slow),
        pytest.param(STEPS_PER_EPOCH, "no", marks=pytest.mark.slow),
    ],
)
def test_what_is_due_at_the_end_of_an_epoch_is_done_there_alone(step, save_strategy, straight, tmp_path):
    options = {**EVALUATED, "objects": {"eval_dataset": image_rows(3)}, "save_strategy": save_strategy}
    first = make(tmp_path, step, **options)
    first.train()
    assert first.state.global_step == step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert verify_checkpoint(tmp_path / f"checkpoint-{step}") == []
    again = make(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again, straight)
    assert logged(again, set()) == logged(straight, set())


def same_for_all(completions, **kwargs) -> list[float]:
    return [0.0] * len(completions)


def test_it_is_saved_without_being_the_best(tmp_path):
    """Evaluation decides on saving here."""
    options = {**EVALUATED, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    options |= {"metric_for_best_model": "reward", "greater_is_better": True, "reward": same_for_all}
    trainer = make(tmp_path, 3, objects={"eval_dataset": image_rows(3)}, **options)
    trainer.train()
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("number", ASKING[1:])
def test_what_schedulers_and_terminals_send_ends_it_with_a_checkpoint(number, tmp_path):
    trainer = make(tmp_path, 2, number)
    trainer.train()
    assert trainer.state.global_step == 2 and verify_checkpoint(tmp_path / "checkpoint-2") == []


IN_A_TERMINAL = """
import gc, sys
gc.disable()  # while much is imported that stays
from pathlib import Path
import torch
from trainers.checkpoints.test_signals import make
gc.freeze()
gc.enable()
make(Path(sys.argv[1]), max_steps=10**6).train()
"""


@pytest.mark.slow
def test_it_saves_when_its_terminal_is_closed(tmp_path):
    """Its output then fails."""
    terminal, its_end = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = python_command(["-c", IN_A_TERMINAL, tmp_path])
    process = subprocess.Popen(command, env=python_environment(), preexec_fn=own_terminal, **streams)
    os.close(its_end)
    try:
        printed = b""
        while printed.count(b"step ") < 3:
            printed += os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert verify_checkpoint(checkpoint) == []


WITHOUT_IT = {"enable_jit_checkpoint": False, "save_strategy": "epoch"}


@pytest.mark.parametrize(
    ("options", "left"),
    [({"save_strategy": "no"}, []), ({}, ["checkpoint-1"])],
    ids=["nothing to save", "the program's handler"],
)
@pytest.mark.parametrize("number", ASKING)
def test_without_the_option_these_signals_are_not_handled(number, options, left, tmp_path):
    """The program's handler raises at once, in step 2, and the last whole step is saved as at any error."""
    with pytest.raises(Unhandled):
        make(tmp_path, 2, number, **{**WITHOUT_IT, **options}).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.default_int_handler])
def test_signals_that_nothing_else_handles_end_it_as_ctrl_c_does(number, default, tmp_path):
    before = signal.signal(number, default)
    trainer = make(tmp_path, 2, number, number, **WITHOUT_IT)  # launchers repeat signals
    try:
        with pytest.raises(KeyboardInterrupt, match=f"after step 2 of .*; resume from {tmp_path}/checkpoint-2"):
            trainer.train()
    finally:
        assert signal.signal(number, before) == default
    assert verify_checkpoint(tmp_path / "checkpoint-2") == []


def test_a_process_that_was_forked_ends_at_its_own_signal(tmp_path):
    """As those of a reward function, which a pool terminates and waits for."""
    codes = []

    class Forks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            process = multiprocessing.get_context("fork").Process(target=signal.pause)
            process.start()
            process.terminate()
            process.join(20)
            process.kill()
            codes.append(process.exitcode)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer = make(tmp_path, max_steps=1, **WITHOUT_IT)
    trainer.add_callback(Forks())
    trainer.train()
    signal.signal(signal.SIGTERM, before)
    assert codes == [-signal.SIGTERM] and trainer.state.global_step == 1


def test_ctrl_c_saves_a_checkpoint_before_it_raises(straight, tmp_path):
    options = {**EVALUATED, "objects": {"eval_dataset": image_rows(3)}, **WITHOUT_IT}
    first = make(tmp_path, 2, signal.SIGINT, **options)
    with pytest.raises(KeyboardInterrupt, match=f"resume from {tmp_path}/checkpoint-2"):
        first.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    again = make(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again, straight)


def test_ctrl_c_after_the_last_step_still_raises(tmp_path):
    class AfterTheLast(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            signal.raise_signal(signal.SIGINT)

    trainer = make(tmp_path, enable_jit_checkpoint=False, save_strategy="steps", max_steps=1)
    trainer.add_callback(AfterTheLast())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_ctrl_c_ends_a_run_without_checkpoints_at_once(tmp_path):
    with pytest.raises(Unhandled):
        make(tmp_path, 2, signal.SIGINT, enable_jit_checkpoint=False).train()


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    options = {**REUSED, "self_check": False, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(Interrupted, "qwen2_5_vl", image_rows(5), tmp_path, **options)
    trainer.step = 2
    trainer.numbers = (signal.SIGINT, signal.SIGINT)
    with pytest.raises(Unhandled):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_ctrl_c_after_another_signal_ends_it_at_once_and_so_does_what_torchs_launcher_sends_then(numbers, tmp_path):
    with pytest.raises(Unhandled):
        make(tmp_path, 2, *numbers).train()
    assert not [*tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize("jit", [True, False])
def test_an_interactive_session_is_interrupted_at_once(jit, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(Unhandled):
        make(tmp_path, 2, signal.SIGINT, enable_jit_checkpoint=jit, save_strategy="steps").train()
    trainer = make(tmp_path, 2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """`nohup` ignores the terminal's signals, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = make(tmp_path, 2, signal.SIGINT, max_steps=3)
    trainer.train()
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("jit", [True, False])
def test_in_a_thread_it_warns_that_signals_are_not_handled(jit, tmp_path, caplog):
    trainer = make(tmp_path, max_steps=1, enable_jit_checkpoint=jit, save_strategy="steps")
    thread = threading.Thread(target=trainer.train)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert ("`enable_jit_checkpoint` has no effect" in caplog.text) == jit
    assert trainer.state.global_step == 1


ENDS = """
import os, signal, sys, torch
from trl_multimodal_rft import launchers
torch.multiprocessing._prctl_pr_set_pdeathsig = lambda number: print("ends with it", number)
launchers.end_with_launcher()
print("goes on")
"""


def started(launched_by: str | None) -> tuple[int, list[str]]:
    environment = python_environment() | ({} if launched_by is None else {launchers._LAUNCHED_BY: launched_by})
    run = forked.run([sys.executable, "-c", ENDS], env=environment, capture_output=True)
    return run.returncode, run.stdout.splitlines()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux tells")
def test_a_launched_process_ends_where_its_launcher_has_ended_before():
    """It still imported, when no signal was asked for. A process that nobody waits for isn't running."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        assert started(f"{platform.node()}:{ended.pid}") == (-signal.SIGTERM, [])
        ended.wait()
    for other in (None, f"{platform.node()}:{os.getpid()}", f"other:{ended.pid}"):
        assert started(other) == (0, ["goes on"])


def test_it_does_not_end_with_a_shell(monkeypatch):
    """With a launcher, it does: `distributed/test_killed.py`."""
    monkeypatch.setattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", lambda number: pytest.fail("with a shell"))
    launchers.end_with_launcher()
    monkeypatch.setattr(launchers, "_is_launcher", lambda process_id: True)
    with pytest.raises(pytest.fail.Exception, match="with a shell"):
        launchers.end_with_launcher()


WAITS = """
import sys
from trl_multimodal_rft import launchers
launchers._GRACE = 0.5
launchers.end_with_others()
print("waits", flush=True)
sys.stdin.read()
"""


def test_a_process_that_no_signal_reaches_ends_after_one_that_failed(tmp_path, monkeypatch):
    """Not before the script of that one has ended, which may save something after the error."""
    files = [tmp_path / str(rank) / "error.json" for rank in range(2)]
    for file in files:
        file.parent.mkdir()
    failed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    more = {"TORCHELASTIC_ERROR_FILE": str(files[0]), "WORLD_SIZE": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    waiting = subprocess.Popen([sys.executable, "-c", WAITS], env=python_environment(**more), **pipes)
    assert waiting.stdout.readline() == b"waits\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[1]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: failed.pid)
        launchers.report_error(ValueError, ValueError("no such file"), None)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=3)
    failed.communicate(b"\n")
    assert waiting.wait(timeout=PATIENCE) == 1


def test_a_trainer_watches_for_errors_of_others(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(trainer_module, "end_with_others", lambda: calls.append("watches"))
    make(tmp_path, 1)
    assert calls == ["watches"]


FAILS = """
import sys
from trl_multimodal_rft import launchers
error = ValueError("no such file, token=hunter2")
launchers.report_error(ValueError, error, None)
if sys.argv[1] == "raises":
    raise error
"""


@pytest.mark.parametrize("end", ["raises", "goes on"])
def test_an_error_that_a_script_handles_is_forgotten(end, tmp_path):
    file = tmp_path / "0" / "error.json"
    file.parent.mkdir()
    environment = python_environment(TORCHELASTIC_ERROR_FILE=str(file), WORLD_SIZE="2")
    run = forked.run([sys.executable, "-c", FAILS, end], env=environment, capture_output=True)
    assert run.returncode == (end == "raises") and file.exists() == (end == "raises")
    assert not file.exists() or "ValueError: no such file, token=***" in file.read_text()


@pytest.mark.parametrize("name", ["", "gone/0/error.json"])
def test_a_launcher_without_logs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", name and str(tmp_path / name))
    launchers.report_error(ValueError, ValueError("no such file"), None)
    assert not launchers.another_failed() and not [*tmp_path.rglob("*")]
