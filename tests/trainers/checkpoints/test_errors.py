# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run that an error ends leaves its last whole step, and goes on from it as if there had been no error."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers import forked
from helpers.ended_runs import ENDS, OF_SOME, SAVED, TABLE, TABLE_OF_TWO, World, end_at, made
from helpers.marks import slow_but
from helpers.processes import TESTS, python_command, python_environment
from helpers.resumed_runs import (
    EVERYTHING,
    REPLAY,
    REUSED,
    Case,
    Recording,
    equal,
    few_live,
    logged,
    same_weights,
    straight_runs,
)
from helpers.trainer_utils import TRAINERS, image_rows
from transformers import Trainer

from trl_multimodal_rft import (
    MultimodalDistillationTrainer,
    MultimodalDPOTrainer,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


STEP = 3  # the last whole step, in the middle of a rollout
SAMPLED = 4  # the step before which the second rollout is sampled
READING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "max_steps": 6}
READING |= {"learning_rate": 1e-2, "save_strategy": "steps", "max_length": 512, "reward": None}


class RecordingGRPO(Recording, MultimodalGRPOTrainer):
    pass


def said(words: str) -> list[dict]:
    return [{"role": "assistant", "content": words}]


def with_answers(n: int):
    return image_rows(n).add_column("completion", [said(f"It is {i}.") for i in range(n)])


def with_pairs(n: int):
    rows = image_rows(n).add_column("chosen", [said(f"It is {i}.") for i in range(n)])
    return rows.add_column("rejected", [said(f"There are {i} of them") for i in range(n)])


class Whole(Case):
    """A case with all of its options."""

    @property
    def arguments(self) -> dict:
        return self.options


def case(trainer, options, rows=image_rows) -> Whole:
    return Whole(trainer, "qwen2_5_vl", rows, {**options, "save_steps": 100}, [STEP])


GRPO = {**REUSED, **REPLAY, "reward": few_live, "beta": 0.1, "kl_target": 0.01, "kl_horizon": 50, "max_steps": 6}
DISTILLATION = {"teacher_view": "blank", "self_teacher": "ema(rate=0.3)", "num_generations": 2, "max_steps": 6}
DISTILLATION |= {"per_device_train_batch_size": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
DISTILLATION |= {"save_strategy": "steps", "reward": None}
CASES = {
    "grpo": case(RecordingGRPO, GRPO),
    "ppo": case(MultimodalPPOTrainer, {**EVERYTHING, "ptx_coef": 0.0, "max_steps": 6}),
    "sft": case(MultimodalSFTTrainer, READING, with_answers),
    "dpo": case(MultimodalDPOTrainer, READING, with_pairs),
    "distillation": case(MultimodalDistillationTrainer, DISTILLATION),
}


class Away(RuntimeError):
    pass


def raising(trainer, name: str, monkeypatch, owner=None, call: int = 1, step: int = STEP):
    """Lets a method raise at its `call`-th call after a step, by default after the method has run."""
    owner = trainer if owner is None else owner
    method = getattr(owner, name)
    n_calls = 0

    @functools.wraps(method)
    def raise_later(*args, **kwargs):
        nonlocal n_calls
        n_calls += trainer.state.global_step == step
        result = method(*args, **kwargs)
        if n_calls == call:
            raise Away("the judge is away")
        return result

    monkeypatch.setattr(owner, name, raise_later)


MOMENTS = {
    "a row": lambda trainer, patch: raising(trainer, "get_batch_samples", patch, owner=Trainer),
    "a sampled batch": lambda trainer, patch: raising(trainer, "_run_stages", patch, step=SAMPLED),
    "the first loss": lambda trainer, patch: raising(trainer, "compute_loss", patch),
    "the second loss": lambda trainer, patch: raising(trainer, "compute_loss", patch, call=2),
    "the gradient": lambda trainer, patch: raising(trainer, "_get_grad_norm", patch),
    "what follows a step": lambda trainer, patch: raising(trainer, "_maybe_log_save_evaluate", patch),
}
KINDS = [("ppo", "the second loss"), *(("grpo", moment) for moment in MOMENTS)]
KINDS += [(name, moment) for name in ("ppo", "sft", "dpo", "distillation") for moment in ("a row", "the first loss")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return straight_runs(CASES, tmp_path_factory)


def failing(name: str, moment: str, folder: Path, monkeypatch, **options):
    trainer = CASES[name].make(folder, **options)
    with monkeypatch.context() as patch:
        if moment in MOMENTS:
            MOMENTS[moment](trainer, patch)
        with pytest.raises(Away) as raised:
            trainer.train()
    return trainer, raised.value


@pytest.mark.gate
@pytest.mark.parametrize(("name", "moment"), KINDS)
def test_the_last_whole_step_is_saved_and_goes_on(name, moment, straight, tmp_path, monkeypatch):
    case = CASES[name]
    trainer, error = failing(name, moment, tmp_path / "ended", monkeypatch)
    (folder,) = (tmp_path / "ended").glob("checkpoint-*")
    assert folder.name == f"checkpoint-{SAMPLED if moment == 'a sampled batch' else STEP}"
    note = f"The last checkpoint is {folder}; `resume_from_checkpoint=True` resumes it."
    assert error.__notes__ == [note]
    uninterrupted = straight(name)
    resumed = case.resume(folder, tmp_path / "resumed")
    assert same_weights(uninterrupted, resumed)
    assert not same_weights(uninterrupted, trainer)
    assert logged(resumed) == logged(uninterrupted)


@pytest.mark.gate
def test_half_an_update_is_not_saved(tmp_path, monkeypatch):
    trainer = CASES["grpo"].make(tmp_path, save_steps=2)
    step = torch.optim.AdamW.step

    def half(self, *args, **kwargs):
        step(self, *args, **kwargs)
        if trainer.state.global_step == STEP:
            raise Away("out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    with pytest.raises(Away) as raised:
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert "The last checkpoint is" in raised.value.__notes__[0] and "checkpoint-2;" in raised.value.__notes__[0]


@pytest.mark.gate
def test_a_step_that_is_saved_is_not_saved_again(tmp_path, monkeypatch):
    trainer, error = failing("sft", "a row", tmp_path, monkeypatch, save_steps=1)
    assert f"checkpoint-{STEP};" in error.__notes__[0]
    assert len([*tmp_path.glob("checkpoint-*")]) == STEP


@pytest.mark.gate
def test_nothing_is_saved_that_nobody_asked_for(tmp_path, monkeypatch):
    _, error = failing("sft", "a row", tmp_path, monkeypatch, save_strategy="no")
    assert not hasattr(error, "__notes__") and not [*tmp_path.glob("checkpoint-*")]


@pytest.mark.gate
def test_a_checkpoint_that_cannot_be_written_is_named_and_the_error_stays(tmp_path, monkeypatch):
    trainer = CASES["sft"].make(tmp_path)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer, "_save_checkpoint", full)
    MOMENTS["a row"](trainer, monkeypatch)
    with pytest.raises(Away, match="the judge is away") as raised:
        trainer.train()
    assert raised.value.__notes__ == [f"Step {STEP} couldn't be saved, either: No space left on device"]


# What ends runs of all trainers, with their evaluations

QUICK = [
    *(("sft", end) for end in ENDS if ("sft", end) in TABLE),
    ("dpo", "a file"),
    ("kto", "the memory"),
    ("reward", "a callback"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    @functools.cache
    def run(name: str, end: str):
        folder = tmp_path_factory.mktemp("uninterrupted")
        trainer = made(name, folder / "run", World(folder), end)
        trainer.train()
        return trainer

    return lambda name, end: run(name, end if end == "an environment" else "")


def logged_but(trainer, end: str) -> list[dict]:
    """Returns the log history, without the line that an error after the update keeps from being written."""
    lost = end == "a callback after a step"
    return [entry for entry in logged(trainer) if not (lost and entry["step"] == STEP and "loss" in entry)]


@pytest.mark.parametrize(("name", "end"), slow_but(TABLE, *QUICK, mark=pytest.mark.gate))
def test_a_run_goes_on_after_any_end(name, end, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "run"
    world = World(tmp_path, end)
    ended = made(name, folder, world, end)
    end_at(ended, world, end)
    with pytest.raises((Exception, KeyboardInterrupt)) as raised:
        ended.train()
    world.close()
    step = ended.state.global_step
    last = SAVED if end == "half an update" else step
    found = {int(path.name.partition("-")[2]): path for path in folder.glob("checkpoint-*")}
    assert max(found) == last and step in (STEP - 1, STEP, STEP + 1)
    assert all(verify_checkpoint(path) == [] for path in found.values())
    told = str(raised.value) if raised.type is KeyboardInterrupt else raised.value.__notes__[0]
    assert str(found[last]) in told

    world = World(tmp_path, end)
    resumed = made(name, folder, world, end)
    resumed.train(resume_from_checkpoint=True)
    world.close()
    expected = uninterrupted(name, end)
    assert same_weights(expected, resumed)
    assert logged_but(resumed, end) == logged_but(expected, end)


# One of two processes, which saves nothing, since the other one may wait for it

QUICK_OF_TWO = [("sft", "a callback"), ("grpo", "a reward"), ("dpo", "half an update")]
OTHERS_OF_TWO = [case for case in TABLE_OF_TWO if case not in QUICK_OF_TWO]


def run_of_two(folder: Path, name: str, end: str, part: str):
    World(folder)  # the files before both processes need them
    command = python_command([TESTS / "helpers" / "ended_script.py", folder, name, end, part], processes=2)
    return forked.run(command, capture_output=True, env=python_environment(ACCELERATE_USE_CPU="true"))


@pytest.fixture(scope="module")
def uninterrupted_of_two(tmp_path_factory):
    @functools.cache
    def run(name: str):
        folder = tmp_path_factory.mktemp("of_two")
        done = run_of_two(folder, name, "none", "whole")
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(folder / "whole.pt", weights_only=False)

    return run


@pytest.mark.parametrize(
    ("name", "end"),
    [
        pytest.param(*case, marks=pytest.mark.gate if case in QUICK_OF_TWO else pytest.mark.slow)
        for case in TABLE_OF_TWO
    ],
)
def test_two_processes_go_on_from_the_last_checkpoint(name, end, uninterrupted_of_two, tmp_path):
    ended = run_of_two(tmp_path, name, end, "ended")
    files = [path.name for path in tmp_path.glob("error-*.json")]
    assert ended.returncode == 1 and files == ["error-1.json"], ended.stderr[-3000:]
    told = json.loads((tmp_path / "error-1.json").read_text())
    last_lines = ended.stderr.rpartition("Root Cause")[2]  # of torch's launcher
    assert told["notes"][0] in last_lines and "rank      : 1" in last_lines
    last = told["step"] - told["step"] % SAVED
    folders = {path.name: path for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert f"The last checkpoint is {folders[f'checkpoint-{last}']};" in told["notes"][0]
    assert {*folders} == {f"checkpoint-{step}" for step in range(SAVED, last + 1, SAVED)}
    assert all(verify_checkpoint(path) == [] for path in folders.values())
    resumed = run_of_two(tmp_path, name, end, "resumed")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert equal(torch.load(tmp_path / "resumed.pt", weights_only=False), uninterrupted_of_two(name))


def test_the_table_has_all_trainers():
    assert len(TABLE) >= 60 and {name for name, _ in TABLE} == {*TRAINERS}
    assert all((name, end) in TABLE for name in TRAINERS for end in ENDS if end not in OF_SOME)
