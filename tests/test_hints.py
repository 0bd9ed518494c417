# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run with all-equal rewards warns once."""

import re

import pytest
from datasets import Dataset
from helpers.trainer_utils import make_trainer, moved

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.reporting import hints
from trl_multimodal_rft.reporting.hints import constant_rewards, steps_without_signal


def test_steps_without_signal():
    def log(step, share, mean=0.5, std=0.3):
        return {"step": step, "frac_reward_zero_std": share, "reward": mean, "reward_std": std}

    assert steps_without_signal([], True) == 0
    assert steps_without_signal([log(10, 0.9), log(20, 1.0), {"step": 25}, log(30, 1.0)], True) == 20
    assert steps_without_signal([log(10, 1.0), log(20, 0.99)], True) == 0
    assert steps_without_signal([log(10, 0.0), log(20, 0.0, std=0.0), log(30, 0.0, std=0.0)], True) == 20
    assert steps_without_signal([log(1, 0.5), {"step": 3}, log(4, 1.0), {"step": 6}], True) == 3
    # Groups of one are always equal; the hint then compares all rewards
    assert steps_without_signal([log(10, 1.0), log(20, 1.0)], False) == 0
    assert steps_without_signal([log(10, 1.0), log(20, 1.0, std=1e-9), log(30, 1.0, 0.0, 0.0)], False) == 20
    assert steps_without_signal([log(10, 1.0, std=None)], False) == 0


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
        (MultimodalRLOOTrainer, always_one, 1, {"beta": 0.5}),  # TRL's metric sees the KL divergence from a reference
        (MultimodalPPOTrainer, always_one, 1, {}),
        (MultimodalPPOTrainer, equal_in_a_group, 0, {}),
    ],
)
def test_a_run_warns_once(trainer_class, reward, n_warnings, options, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(hints.logger, "warning", warned.append)
    monkeypatch.setattr(hints.EqualRewardsHint.__init__, "__defaults__", (2,))
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
    monkeypatch.setattr(hints.logger, "warning", warned.append)
    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    for steps in (7, 8):
        options = {"max_steps": steps, "logging_steps": 1, "self_check": False, "reward": [varied, always_one]}
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / str(steps), **options).train()
        assert len(warned) == (steps == 8)
    assert "'always_one' has given all completions the same reward for 8 steps (1)" in warned[0]
