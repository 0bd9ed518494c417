# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run with all-equal rewards warns once."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from helpers.trainer_utils import make_trainer, moved

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.trainers.shared import rollout_logs
from trl_multimodal_rft.trainers.shared.rollout_logs import constant_rewards


@pytest.mark.parametrize(
    ("grouped", "rollouts", "steps"),
    [
        (True, [([1, 1, 2, 2], False), ([1, 1, 2, 2], False)], 2),
        (True, [([1, 1, 2, 2], False), ([1, 2, 2, 2], True)], 0),
        (True, [([1, 2, 2, 2], True), ([1, 1, 2, 2], False)], 1),
        # Groups of one are always equal; the hint then compares all rewards
        (False, [([1, 1, 2, 2], False), ([1, 1, 2, 2], False)], 0),
        (False, [([3, 3, 3, 3 + 1e-7], False), ([0, 0, 0, 0], False)], 2),
        (False, [([math.nan, 3, 3, 3], False), ([0, math.nan, 0, 0], False)], 2),
        (False, [([math.nan] * 4, False)] * 2, 0),
        (True, [([math.nan] * 4, False)] * 2, 0),
    ],
)
def test_steps_whose_rewards_are_equal(grouped, rollouts, steps, monkeypatch):
    warned = []
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    hint = rollout_logs.EqualRewardsHint(grouped, patience=1)
    for step, (rewards, differ) in enumerate(rollouts):
        hint.record_rewards(torch.tensor(rewards, dtype=torch.float32), torch.full((4,), differ), step)
    hint.on_log(None, SimpleNamespace(global_step=len(rollouts), log_history=[{"reward": 1.0, "step": 2}]), None)
    assert len(warned) == (steps > 0) and all(f"for {steps} steps" in each for each in warned)


def test_constant_rewards():
    def log(step, **functions):
        values = {f"rewards/{name}/{key}": value for name, pair in functions.items() for key, value in pair.items()}
        return {"step": step, "reward": 0.5, **values}

    never, once = {"mean": 0.0, "std": 0.0}, {"mean": 1.0, "std": 0.0}
    history = [log(1, a=never, b=never), {"step": 2}, log(3, a=never, b={"mean": 0.1, "std": 0.3}), log(4, a=never)]
    assert constant_rewards(history) == {"a": (4, 0.0)}
    assert constant_rewards([log(1, a=never), log(2, a=once)]) == {}  # another one in each batch
    assert constant_rewards([log(1, a={"mean": None, "std": None})]) == {}


def equal_in_a_group(prompts, **kwargs):
    return [float(len(str(prompt))) for prompt in prompts]


def always_one(prompts, **kwargs):
    return [1.0] * len(prompts)


@pytest.mark.parametrize(
    ("trainer_class", "reward", "n_warnings", "options"),
    [
        (MultimodalGRPOTrainer, equal_in_a_group, 1, {}),
        (MultimodalRLOOTrainer, always_one, 1, {}),
        (MultimodalGRPOTrainer, equal_in_a_group, 1, {"scale_rewards": "batch"}),
        # TRL's metric sees the KL divergence from a reference
        (MultimodalRLOOTrainer, always_one, 1, {"beta": 0.5}),
        (MultimodalRLOOTrainer, equal_in_a_group, 1, {"beta": 0.5}),
        (MultimodalPPOTrainer, always_one, 1, {}),
        (MultimodalPPOTrainer, equal_in_a_group, 0, {}),
    ],
)
def test_a_run_warns_once(trainer_class, reward, n_warnings, options, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    monkeypatch.setattr(rollout_logs.EqualRewardsHint.__init__, "__defaults__", (2,))
    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    options = {"max_steps": 3, "logging_steps": 1, "self_check": False, **options}
    objects = moved("qwen2_5_vl") if "beta" in options else None
    trainer = make_trainer(trainer_class, "qwen2_5_vl", rows, tmp_path, reward=reward, objects=objects, **options)
    trainer.train()
    if "beta" in options:
        assert trainer.state.log_history[0]["frac_reward_zero_std"] < 1
    assert len(warned) == n_warnings
    assert all(re.match("All completions.* same reward for 2 steps", each) for each in warned)


def varied(prompts, **kwargs):
    return [float(i % 4) for i in range(len(prompts))]


def test_a_function_that_rewards_all_alike_is_named_after_eight_steps(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    for steps in (7, 8):
        options = {"max_steps": steps, "logging_steps": 1, "self_check": False, "reward": [varied, always_one]}
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / str(steps), **options).train()
        assert len(warned) == (steps == 8)
    assert "'always_one' has given all completions the same reward for 8 steps (1)" in warned[0]
