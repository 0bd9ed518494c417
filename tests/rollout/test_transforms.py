# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A dataset with code of its own, such as a transform, sees the run's state, and draws numbers that are never drawn
again, but for a resumed run."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.resumed_runs import checkpoint, same_weights
from helpers.trainer_utils import TRAINERS, make_trainer
from PIL import Image
from transformers import TrainerCallback, set_seed

from trl_multimodal_rft.data.rows.prefetch import PrefetchPool
from trl_multimodal_rft.data.rows.seeds import seeded


# Three epochs of two steps of two rows
STEPS = 6
OPTIONS = {"max_steps": STEPS, "media_prefetch": 1, "self_check": False, "learning_rate": 1e-3}
ANSWERS = {
    "grpo": {},
    "sft": {"completion": "It is a cat."},
    "dpo": {"chosen": "It is a cat.", "rejected": "No"},
}


def table(kind: str, **columns) -> Dataset:
    prompts = [f"Describe the images. {i}" for i in range(4)]
    answers = {name: [answer] * 4 for name, answer in ANSWERS[kind].items()}
    return Dataset.from_dict({"prompt": prompts, **answers, **columns})


def picture(*color: int) -> Image.Image:
    return Image.new("RGB", (56, 56), color)


class Watched:
    """A trainer whose model's colors are recorded, each with the number of steps before."""

    def __init__(self, kind, rows, folder, **options):
        size = {"per_device_train_batch_size": 8 if kind == "grpo" else 2}
        reward = {} if kind == "grpo" else {"reward": None}
        self.trainer = make_trainer(TRAINERS[kind], "qwen2_5_vl", rows, folder, **OPTIONS, **size, **reward, **options)
        self.seen = {}
        self.trainer.model.model.visual.register_forward_pre_hook(self.see)

    def see(self, module, args):
        for patches in args[0].split(16):  # of a picture
            color = tuple(patches[0, [0, 392, 784]].tolist())  # one pixel of its channels
            self.seen.setdefault((self.trainer.state.global_step, color))

    def trained(self, *args):
        self.trainer.train(*args)
        assert self.trainer.state.global_step == STEPS
        return self


# State


class Growing(Dataset):
    """Has a method in place of a transform."""

    level = 0

    def __getitems__(self, indices):
        return [{**row, "image": picture(self.level, 0, 0)} for row in super().__getitems__(indices)]


class Raising(TrainerCallback):
    def __init__(self, level):
        self.level = level

    def on_step_end(self, args, state, control, **kwargs):
        self.level(40 * state.global_step)


def levels(kind, form, folder, **options):
    """Returns the red of the pictures in each step of a run that raises it by 40 after each step."""
    state = {"level": 0}
    rows = table(kind, image=[picture(255, 0, 0)] * 4)
    if form == "subclass":
        rows = Growing(rows.data, rows.info, fingerprint=rows._fingerprint)
        callback = Raising(lambda value: setattr(Growing, "level", value))
        callback.level(0)
    else:
        callback = Raising(lambda value: state.update(level=value))
        rows = rows.with_transform(
            lambda batch: {**batch, "image": [picture(state["level"], 0, 0) for _ in batch["prompt"]]}
        )
    run = Watched(kind, rows, folder, **options)
    run.trainer.add_callback(callback)
    reds = [color[0] for _, color in run.trained().seen]
    assert [step for step, _ in run.seen] == [*range(STEPS)]
    return (np.asarray(reds) * 0.26862954 + 0.48145466) * 255  # the processor's scale


@pytest.mark.parametrize(
    ("kind", "form"), [("grpo", "transform"), ("sft", "transform"), ("dpo", "transform"), ("sft", "subclass")]
)
def test_curriculum_of_a_callback(kind, form, tmp_path):
    """Rows follow it at once, and in workers from the next epoch on."""
    assert levels(kind, form, tmp_path) == pytest.approx([0, 40, 80, 120, 160, 200], abs=0.1)
    in_workers = levels(kind, form, tmp_path, dataloader_num_workers=2)
    assert in_workers == pytest.approx([0, 0, 80, 80, 160, 160], abs=0.1)


@pytest.mark.parametrize(("workers", "expected"), [(0, [1, 0]), (2, [1, 3])])
def test_workers_of_a_transform_live_for_an_epoch(workers, expected, tmp_path, monkeypatch):
    """And only if they are asked for. Without a transform, they live as long as the run. No row is read in vain."""
    read = tmp_path / "read"

    def transform(batch):
        with read.open("a") as file:
            file.write("row\n" * len(batch["prompt"]))
        return batch

    forks = []
    fork = PrefetchPool._fork_workers

    def counted(pool, row_index):
        forks.append(row_index)
        return fork(pool, row_index)

    monkeypatch.setattr(PrefetchPool, "_fork_workers", counted)
    plain = table("sft", image=[picture(255, 0, 0)] * 4)
    for rows, n_forks in zip((plain, plain.with_transform(transform)), expected, strict=True):
        forks.clear()
        run = Watched("sft", rows, tmp_path, dataloader_num_workers=workers)
        read.write_text("")  # the constructor inspects rows
        run.trained()
        assert len(forks) == n_forks
    assert len(read.read_text().split()) == 3 * 4  # epochs, rows


# Random numbers


def drawn(kind) -> Dataset:
    """Returns rows with three pictures, whose colors are drawn by three libraries."""

    def pictures():
        yield picture(*np.random.randint(0, 255, 3).tolist())
        yield picture(*(random.randrange(255) for _ in range(3)))
        yield picture(*torch.randint(0, 255, (3,)).tolist())

    return table(kind).with_transform(lambda batch: {**batch, "images": [[*pictures()] for _ in batch["prompt"]]})


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("workers", [0, 2, pytest.param(4, marks=pytest.mark.gate)])
def test_numbers_are_new_for_each_row_and_epoch_and_again_after_resuming(kind, workers, tmp_path):
    options = {"dataloader_num_workers": workers}
    run = Watched(kind, drawn(kind), tmp_path, **options, save_strategy="steps", save_steps=1).trained()
    assert len({color for _, color in run.seen}) == len(run.seen) == 3 * 4 * 3  # epochs, rows, libraries
    for step in (3, 4):  # within an epoch, and between two
        resumed = Watched(kind, drawn(kind), tmp_path / "resumed", **options).trained(checkpoint(run.trainer, step))
        assert [*resumed.seen] == [entry for entry in run.seen if entry[0] >= step]
        assert same_weights(resumed.trainer, run.trainer)


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_seeds_leave_the_states():
    set_seed(0)
    expected = [draw() for _ in range(2)]
    set_seed(0)
    assert draw() == expected[0]
    inner = set()
    for numbers in ((0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2)):
        with seeded(*numbers):
            inner.add(draw())
    assert len(inner) == 3 and draw() == expected[1]
