# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A PPO run that stops at any step and resumes from its checkpoint equals the uninterrupted run bit for bit."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.marks import slow_but
from helpers.resumed_runs import (
    REPLAY,
    Case,
    Recording,
    answered,
    answered_audio,
    checkpoint,
    equal,
    few_live,
    logged,
    same_weights,
    stops_of,
    straight_runs,
)
from helpers.trainer_utils import audio_rows, image_rows
from peft import LoraConfig

from trl_multimodal_rft import MultimodalPPOTrainer


pytestmark = pytest.mark.gate


class RecordingPPO(Recording, MultimodalPPOTrainer):
    """Records the inputs of each micro-batch, including supervised rows."""

    def _supervised_batch(self):
        batch = super()._supervised_batch()
        if batch is not None:
            self.trained_on.append(([prompt.input_ids.tolist() for prompt in batch.prompts], batch.ids.tolist()))
        return batch


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)


def image_case(options, stops, moving=(), family="qwen2_5_vl"):
    return Case(RecordingPPO, family, image_rows, options, stops, moving, supervised=lambda: answered(image_rows()))


def audio_case(options, stops, **fields):
    return Case(RecordingPPO, "qwen2_audio", audio_rows, options, stops, supervised=answered_audio, **fields)


# Between the epochs of a generation batch, between two generation batches, and inside the second epoch
EVERYWHERE = [2, 4, 3]
CASES = {
    "audio": audio_case({}, EVERYWHERE),
    "tied weights": image_case({}, [3], family="gemma3"),
    "shared trunk": image_case({"shared_trunk": True}, [3]),
    "adapter": audio_case({"objects": {"peft_config": LORA}}, [3]),
    "adapter on a shared trunk": image_case({"objects": {"peft_config": LORA}, "shared_trunk": True}, [5]),
    "replay, dynamic sampling": image_case({**REPLAY, "reward": few_live, "max_steps": 10}, [6], ["replay/frac"]),
    "one completion of a prompt": audio_case({"num_generations": 1, "max_steps": 6}, [3], n_rows=17),
    "synchronised reference": image_case(
        {
            "kl_target": None,
            "kl_horizon": 10000,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "ref_model_mixup_alpha": 0.5,
        },
        [3],
    ),
    "high entropies, divergence in the loss": audio_case(
        {"top_entropy_quantile": 0.4, "entropy_source": "current", "kl_estimator": "k2"}, [5]
    ),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return straight_runs(CASES, tmp_path_factory)


def state(trainer) -> dict:
    """Returns all state that must match after a resumed run."""
    return {
        "weights": trainer.model.state_dict(),  # includes the critic
        "average": trainer.ema._average,
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "rollouts": {key: value for key, value in trainer._rollout_state().items() if key not in NOT_COMPARED},
        "logs": logged(trainer),
    }


# Recorded inputs cover prompts, and later groups cover the replay; metrics hold durations
NOT_COMPARED = {"buffered_inputs", "groups", "metrics"}


@pytest.mark.parametrize(("name", "step"), stops_of(CASES, {"audio", "shared trunk"}))
def test_resumed_run_is_the_uninterrupted_run(name, step, straight, tmp_path):
    case = CASES[name]
    uninterrupted = straight(name)
    fresh = case.make(tmp_path).model.state_dict()
    trained = uninterrupted.model.state_dict()
    for part in (True, False):
        moved = [n for n in fresh if n.startswith("critic.") == part and not torch.equal(fresh[n], trained[n])]
        assert moved, "critic" if part else "policy"
    for metric in ["kl", "kl_coef", "value_clip_ratio", "shaped_reward", "ptx_loss", *case.moving]:
        assert any(entry.get(metric, 0) != 0 for entry in uninterrupted.state.log_history), metric
    resumed = case.resume(checkpoint(uninterrupted, step), tmp_path)
    assert resumed.trained_on == rest_of(uninterrupted, step)
    expected = state(uninterrupted)
    actual = state(resumed)
    assert [key for key in expected if not equal(expected[key], actual[key])] == []


def rest_of(trainer, step: int) -> list:
    """Returns the inputs after a step: each micro-batch has one entry, and one for its supervised rows."""
    return trainer.trained_on[2 * step * trainer.args.gradient_accumulation_steps :]


def test_other_supervised_rows_are_logged(straight, tmp_path, caplog):
    folder = checkpoint(straight("shared trunk"), 6)
    for rows, warns in [(5, False), (4, True)]:  # the run uses the first three
        objects = {"ptx_dataset": answered(image_rows(rows).select(range(rows - 3, rows) if warns else range(rows)))}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            CASES["shared trunk"].resume(folder, tmp_path, objects=objects)
        found = [text for text in caplog.messages if "has changed since" in text]
        assert ["`ptx_dataset` has changed since" in text for text in found] == [True] * warns


# Incomplete and other checkpoints


@pytest.fixture
def copied(straight, tmp_path):
    """Copies a checkpoint, to remove something from it."""

    def copy(name: str, step: int) -> Path:
        without_manifest = shutil.ignore_patterns("manifest.json")  # which would reveal it
        source = checkpoint(straight(name), step)
        place = tmp_path / f"checkpoint-{step}"
        return Path(shutil.copytree(source, place, ignore=without_manifest))

    return copy


@pytest.mark.parametrize("missing", ["", "value_head.safetensors"], ids=["critic", "head"])
@pytest.mark.parametrize("name", slow_but(["audio", "adapter", "shared trunk"], "audio", "shared trunk"))
def test_checkpoint_without_a_critic(name, missing, copied, tmp_path):
    folder = copied(name, 3)
    (folder / "critic" / missing).rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"checkpoint-3 has no critic; resume from a checkpoint of PPO with one\."):
        CASES[name].resume(folder, tmp_path)


def test_checkpoint_without_an_average(copied, straight, tmp_path):
    folder = copied("audio", 3)
    (folder / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="checkpoint-3 has no average of the weights; resume without `ema_decay`"):
        CASES["audio"].resume(folder, tmp_path)
    resumed = CASES["audio"].resume(folder, tmp_path, ema_decay=None)
    assert same_weights(resumed, straight("audio"))  # the average doesn't affect it


@pytest.mark.parametrize(
    "changes",
    [{"num_ppo_epochs": 3}, {"advantage_estimator": "gae(gamma=0.9)"}]
    + [pytest.param(each, marks=pytest.mark.slow) for each in ({"bootstrap_truncated": False},)],
)
def test_other_returns_discard_completions(changes, straight, tmp_path, caplog):
    folder = checkpoint(straight("audio"), 3)
    with caplog.at_level(logging.WARNING):
        resumed = CASES["audio"].resume(folder, tmp_path, **changes)
    assert "The settings of batches have changed" in caplog.text
    assert resumed.trained_on != rest_of(straight("audio"), 3)


def test_best_model_is_loaded_with_its_critic(tmp_path):
    """The reward is highest at the first evaluation."""
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "greater_is_better": True,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
        "objects": {"eval_dataset": audio_rows(2)},
        "reward": lambda completion_ids, trainer_state, **kwargs: [
            len(ids) % 3 + 0.1 * (sum(ids) % 7) - 10 * trainer_state.global_step for ids in completion_ids
        ],
    }
    trainer = CASES["audio"].make(tmp_path, **options)
    trainer.train()
    assert trainer.state.best_global_step == 2
    best = CASES["audio"].make(tmp_path / "best", save_strategy="no")
    best._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert same_weights(trainer, best)


# State of a frozen policy in the optimizer, and so in a checkpoint


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"shared_trunk": True}, marks=pytest.mark.slow)],
    ids=["critic of its own", "shared trunk"],
)
def test_optimizer_remembers_nothing_of_a_frozen_policy(options, tmp_path):
    """After the freeze, Adam starts fresh, although a shared trunk had gradients of the values."""
    n_frozen = 3
    n_steps = 4
    case = image_case({}, [])
    options = {**options, "warmup_steps": 0, "max_grad_norm": 1e9, "weight_decay": 0.1}
    frozen = case.make(tmp_path, max_steps=n_frozen, freezing_actor_steps=n_frozen, **options)
    before = {name: p.detach().clone() for name, p in frozen.model.named_parameters()}
    frozen.train()
    for name, p in frozen.model.named_parameters():
        state = frozen.optimizer.state[p]
        if name.startswith("critic."):
            assert state["step"] == n_frozen and not torch.equal(p, before[name]), name
        else:
            assert not any(value.any() for value in state.values()), name
            assert torch.equal(p, before[name]), name
    case = replace(case, trainer=LastGradient)
    thawed = case.make(tmp_path / "thawed", max_steps=n_steps, freezing_actor_steps=n_frozen, **options)
    thawed.train()
    group = thawed.optimizer.param_groups[0]
    for name, p in thawed.model.named_parameters():
        if not name.startswith("critic."):
            state = thawed.optimizer.state[p]
            gradient = thawed.gradients[name]
            assert state["step"] == n_steps - n_frozen
            assert torch.allclose(state["exp_avg"], (1 - group["betas"][0]) * gradient, rtol=1e-5, atol=1e-12), name


class LastGradient(RecordingPPO):
    """Records the gradient of the last update."""

    def _get_grad_norm(self, *args, **kwargs):
        norm = super()._get_grad_norm(*args, **kwargs)
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        return norm
