# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Non-finite numbers: a single gradient doesn't end a run, many do, and the trainer never saves broken weights."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.trainer_utils import InjectedOurs as InjectedGRPO
from helpers.trainer_utils import InjectedPPO, image_rows, logged, make_trainer, run
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer


TRAINERS = {"grpo": InjectedGRPO, "rloo": InjectedRLOO, "ppo": InjectedPPO}
OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
    "optim": "adamw_torch",
    "weight_decay": 0.1,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "self_check": False,
}


class Watching(TrainerCallback):
    """Records the weights before each step and after the last one."""

    def __init__(self):
        self.weights = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    on_train_end = on_step_begin

    def moved(self) -> list[bool]:
        return [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(self.weights)]


class NoGradient(TrainerCallback):
    """Skips the updates of some steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps:
            for parameter in model.parameters():
                parameter.grad = None


class Broken:
    """In some steps, the second micro-batch has a non-finite gradient of one weight."""

    steps: tuple[int, ...] = ()
    value = torch.nan
    weight = "q_proj.weight"

    def training_step(self, model, *args, **kwargs):
        breaks = self.state.global_step in self.steps and self._step % 2 == 1
        weight = next(p for name, p in self.model.named_parameters() if name.endswith(self.weight))
        if not breaks:
            return super().training_step(model, *args, **kwargs)
        hook = weight.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            hook.remove()


def broken(name, steps, value=torch.nan, most=5):
    weight = "critic.head.bias" if name == "ppo" else Broken.weight
    attributes = {"steps": steps, "value": value, "weight": weight, "_max_skipped": most}
    return type("Broken", (Broken, TRAINERS[name]), attributes)


def train(trainer_class, *callbacks, **options):
    watching = Watching()
    objects = {"callbacks": [watching, *callbacks]}
    return run(trainer_class, "qwen2_5_vl", image_rows(), objects=objects, **{**OPTIONS, **options}), watching


@functools.cache
def without_update(name, max_grad_norm):
    """Returns a run with the second update skipped by hand."""
    return train(TRAINERS[name], NoGradient([1]), max_grad_norm=max_grad_norm)


@pytest.mark.parametrize(
    ("name", "value", "max_grad_norm"),
    [
        ("grpo", torch.nan, 1.0),
        ("rloo", torch.inf, 0.0),
        ("ppo", torch.nan, 1.0),
        pytest.param("ppo", torch.inf, 0.0, marks=pytest.mark.slow),
        pytest.param("grpo", torch.inf, 0.0, marks=pytest.mark.slow),
        pytest.param("rloo", torch.nan, 1.0, marks=pytest.mark.slow),
    ],
)
def test_update_without_a_finite_gradient_is_skipped(name, value, max_grad_norm):
    result, watching = train(broken(name, (1,), value), max_grad_norm=max_grad_norm)
    expected, others = without_update(name, max_grad_norm)
    assert watching.moved() == others.moved() == [True, False, True, True, True]
    assert logged(result, "skipped_updates") == [0, 1, 0, 0, 0]
    assert logged(result, "learning_rate") == logged(expected, "learning_rate")
    for key, weight in watching.weights[-1].items():
        assert weight.isfinite().all() and torch.equal(weight, others.weights[-1][key]), key
    states = [list(each.trainer.optimizer.state.values()) for each in (result, expected)]
    assert len(states[0]) == len(states[1]) > 0
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_too_many_in_a_row_raise(name):
    result, _ = train(broken(name, (0, 1, 3, 4), most=2))
    assert logged(result, "skipped_updates") == [1, 1, 0, 1, 1]
    with pytest.raises(FloatingPointError, match="The gradient of 3 updates in a row isn't finite.*before step 2"):
        train(broken(name, (1, 2, 3), most=2))


@pytest.mark.slow
def test_updates_that_were_skipped_count_after_a_resume(tmp_path):
    trainer_class = broken("grpo", (1, 2, 3), most=2)
    saving = {**OPTIONS, "save_strategy": "steps", "save_steps": 3}
    first = make_trainer(trainer_class, "qwen2_5_vl", image_rows(), tmp_path, **saving)
    with pytest.raises(FloatingPointError, match="3 updates in a row"):
        first.train()
    again = make_trainer(trainer_class, "qwen2_5_vl", image_rows(), tmp_path, **OPTIONS)
    with pytest.raises(FloatingPointError, match="3 updates in a row"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


# A scaled loss


class Scaled(Broken, InjectedGRPO):
    """Uses the scaler of half precision, which accelerate creates on accelerators only; numbers stay in float32."""

    value = torch.inf
    scale = 2.0**16

    def create_optimizer(self, *args, **kwargs):
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        return super().create_optimizer(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        return super().training_step(*args, **kwargs)

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            self.accelerator.state._mixed_precision = "no"  # all accelerators share it


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_scale_of_the_loss_that_backs_off_is_not_counted(max_grad_norm):
    trainer_class = type("Scaled", (Scaled,), {"steps": (1, 2, 3), "_max_skipped": 0})
    result, watching = train(trainer_class, max_grad_norm=max_grad_norm)
    assert watching.moved() == [True, False, False, False, True]
    assert logged(result, "skipped_updates") == [0] * 5
    assert result.trainer.accelerator.scaler.get_scale() == 2.0**13
    rates = logged(result, "learning_rate")
    assert rates[1] == rates[2] == rates[3] == rates[4]  # the schedule waits, as in `Trainer`


def test_gradient_that_no_scale_mends_is_counted():
    trainer_class = type("Scaled", (Scaled,), {"steps": (1, 2, 3, 4), "scale": 4.0, "_max_skipped": 1})
    with pytest.raises(FloatingPointError, match="2 updates in a row.*before step 4"):  # overflows don't count
        train(trainer_class)


# Weights


class Poison(TrainerCallback):
    """Breaks one weight after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                dict(model.named_parameters())["lm_head.weight"].view(-1)[7] = torch.nan


@pytest.mark.parametrize("name", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_broken_weights_are_not_saved(name, tmp_path):
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    objects = {"callbacks": [Poison(2)]}
    trainer = make_trainer(TRAINERS[name], "qwen2_5_vl", image_rows(), tmp_path, objects=objects, **options)
    with pytest.raises(FloatingPointError, match="Weights aren't finite after step 2, such as 'lm_head.weight', so"):
        trainer.train()
    assert [path.name for path in Path(tmp_path).glob("*") if path.is_dir()] == ["checkpoint-1"]
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    trainer.save_model(str(tmp_path / "final"))
    files = {path: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    Poison(2).on_step_end(None, trainer.state, None, trainer.model)
    with pytest.raises(FloatingPointError, match="isn't saved in '.*final'; what is saved there stays"):
        trainer.save_model(str(tmp_path / "final"))
    assert {path: path.read_bytes() for path in (tmp_path / "final").iterdir()} == files


class BreakFrozen(TrainerCallback):
    """Breaks one frozen weight."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.lm_head.requires_grad_(False)
        with torch.no_grad():
            model.lm_head.weight[7] = torch.nan


@pytest.mark.parametrize(
    "callback, message",
    [
        (
            Poison(2),
            "Weights aren't finite after step 2, such as 'lm_head.weight', so no completions can be sampled. Resume "
            "from an earlier checkpoint, with a lower `learning_rate`",
        ),
        (
            BreakFrozen(),
            "Logits aren't finite after step 0, so no .* are finite. First lower `learning_rate`. .* frozen ",
        ),
    ],
)
def test_nothing_is_sampled_from_broken_weights(callback, message, tmp_path):
    """Avoids torch's error, which names neither the step nor the remedy."""
    objects = {"callbacks": [callback]}
    options = {**OPTIONS, "max_steps": 4}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, objects=objects, **options)
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
