# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of runs that stop and resume, and comparisons of states that must be equal."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.trainer_utils import make_trainer, sound, text_rows, with_media


class Recording:
    """Mixin that records the inputs of each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained_on = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.model.training:
            prompts = [prompt.input_ids.tolist() for prompt in inputs.prompts]
            self.trained_on.append((prompts, inputs.completion_ids.tolist()))
        return super().compute_loss(model, inputs, *args, **kwargs)


# A generation batch has four prompts, and its two iterations make two optimizer steps each. With five prompts in the
# dataset, an epoch is one generation batch, and the prompt that it omits depends on the order.
REUSED = {
    "media_prefetch": 1,
    "dataloader_num_workers": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_steps": 6,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "save_strategy": "steps",
    "save_steps": 1,
}
STEPS_PER_EPOCH = 4
REPLAY = {"replay_buffer_size": 4, "dynamic_sampling": 2}


def few_live(prompts, trainer_state, **kwargs) -> list[float]:
    """Returns rewards. One of five groups is without signal in the first epoch, and four of five are afterwards."""
    step = trainer_state.global_step
    n_equal = 1 if step < STEPS_PER_EPOCH else 4
    # The text of a prompt ends with the number of its row
    numbers = [int(prompt[-1]["content"][-1]["text"].split()[-1]) for prompt in prompts]
    return [float(i % 2) if (number + step) % 5 >= n_equal else 1.0 for i, number in enumerate(numbers)]


@dataclass
class Case:
    """A run to interrupt."""

    trainer: type
    family: str
    rows: Callable  # returns rows of a given number
    options: dict
    stops: list[int]  # steps to resume from
    moving: Collection[str] = ()  # metrics that must not stay 0
    not_logged: Collection[str] = ()  # metrics that `Trainer` resets
    n_rows: int = 5
    supervised: Callable | None = None  # returns the rows of the supervised loss

    @property
    def arguments(self) -> dict:
        return {**(REUSED if self.supervised is None else EVERYTHING), **self.options}

    def make(self, folder: Path, **options):
        arguments = {**self.arguments, **options}
        objects = {} if self.supervised is None else {"ptx_dataset": self.supervised()}
        objects |= arguments.pop("objects", {})
        return make_trainer(self.trainer, self.family, self.rows(self.n_rows), folder, objects=objects, **arguments)

    def resume(self, folder: str | Path, output_dir: Path, **options):
        trainer = self.make(output_dir, save_strategy="no", **options)
        trainer.train(resume_from_checkpoint=str(folder))
        assert trainer.state.global_step == trainer.args.max_steps
        return trainer


def stops_of(cases: dict[str, Case], quick: Collection[str]) -> list:
    """Returns pairs of a case's name and a step. All are slow except the last stop of each case in `quick`."""
    return [
        pytest.param(name, step, marks=[] if name in quick and step == case.stops[-1] else pytest.mark.slow)
        for name, case in cases.items()
        for step in case.stops
    ]


def straight_runs(cases: dict[str, Case], tmp_path_factory) -> Callable:
    """Returns a function that makes the uninterrupted trainer of a case, with the checkpoints of its options."""

    @functools.cache
    def run(name: str):
        trainer = cases[name].make(tmp_path_factory.mktemp("straight"))
        trainer.train()
        return trainer

    return run


def checkpoint(trainer, step: int) -> str:
    return f"{trainer.args.output_dir}/checkpoint-{step}"


def logged(trainer, but: Collection[str] = ()) -> list[dict]:
    """Returns the log history without durations and without `train_loss`, a mean since the trainer started."""
    durations = ("time", "runtime", "per_second", "train_loss")
    return [
        {key: value for key, value in entry.items() if key not in but and not any(d in key for d in durations)}
        for entry in trainer.state.log_history
    ]


def equal(a, b) -> bool:
    """Returns whether two nested states are equal bit for bit."""
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return (a == b).all().item() if a.shape == b.shape else False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_weights(a, b) -> bool:
    return equal(a.model.state_dict(), b.model.state_dict())


# A generation batch has four prompts, and its two PPO epochs make two optimizer steps each. The dataset has five
# prompts, so that the omitted prompt depends on the order. Two supervised rows per step straddle epochs of three.
EVERYTHING = {
    "media_prefetch": 1,
    "dataloader_num_workers": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_ppo_epochs": 2,
    "max_steps": 7,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "value_learning_rate": 2e-2,
    "value_lr_scheduler_type": "cosine",
    "value_warmup_steps": 0.3,
    "freezing_actor_steps": 1,
    "max_grad_norm": 1.0,
    "beta": 0.1,
    "kl_target": 0.05,
    "kl_horizon": 50,
    "reward_running_scale": True,
    "bootstrap_truncated": True,
    "ema_decay": 0.9,
    "ptx_coef": 0.5,
    "save_strategy": "steps",
    "save_steps": 1,
}


def answered(rows):
    """Returns the first three rows with completions, for the supervised loss."""
    return rows.select(range(3)).add_column("completion", ["It is a cat.", "There are two of them, I think.", "No"])


def answered_audio():
    return with_media(answered(text_rows()), "audio", [sound(0.5 + 0.1 * i, seed=20 + i) for i in range(3)])
