# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run whose rewards teach nothing warns once."""

import re

import pytest
from datasets import Dataset
from helpers.trainer_utils import make_trainer, moved

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.algorithms.signal import CAUSES
from trl_multimodal_rft.trainers.sampling import rollout_logs
from trl_multimodal_rft.trainers.sampling.rollout_logs import constant_rewards, steps_without_signal


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([0.0, 0.0, None, 0.0], 4),
        ([0.5, 0.0, None, 0.0], 3),
        ([0.0, 0.0, 0.1], 0),
        ([0.0, 0.1, None], 0),
        ([None, None], 0),
        ([], 0),
    ],
)
def test_steps_without_signal(shares, steps):
    """A log of `None` has other metrics, as that of an evaluation."""
    history = [
        {"step": step, **({"eval_loss": 1.0} if share is None else {"signal/tokens": share})}
        for step, share in enumerate(shares, 1)
    ]
    assert steps_without_signal(history) == steps


def test_steps_without_the_account():
    """Before a version with it, and with a loss of one's own: rewards of groups tell."""
    older = [{"step": step, "reward": 1.0} for step in range(1, 11)]
    assert steps_without_signal([*older, {"step": 11, "signal/tokens": 0.0}]) == 1
    equal, some = ({"frac_reward_zero_std": share} for share in (1.0, 0.5))
    assert steps_without_signal([{"step": step, **equal} for step in range(1, 4)]) == 3
    assert steps_without_signal([{"step": 1, **equal}, {"step": 2, **some}, {"step": 3, **equal}]) == 1


def test_constant_rewards():
    def log(step, **functions):
        values = {f"rewards/{name}/{key}": value for name, pair in functions.items() for key, value in pair.items()}
        return {"step": step, "reward": 0.5, **values}

    never = {"mean": 0.0, "std": 0.0}
    once = {"mean": 1.0, "std": 0.0}
    history = [log(1, a=never, b=never), {"step": 2}, log(3, a=never, b={"mean": 0.1, "std": 0.3}), log(4, a=never)]
    assert constant_rewards(history) == {"a": (4, 0.0)}
    assert constant_rewards([log(1, a=never), log(2, a=once)]) == {}  # another one in each batch
    assert constant_rewards([log(1, a={"mean": None, "std": None})]) == {}


def equal_in_a_group(prompts, **kwargs):
    return [float(len(str(prompt))) for prompt in prompts]


def always_one(prompts, **kwargs):
    return [1.0] * len(prompts)


def varied(prompts, **kwargs):
    return [float(i % 4) for i in range(len(prompts))]


ENDLESS = {"mask_truncated_completions": True, "generation_kwargs": {"min_new_tokens": 8}}
NO_SIGNAL = r"No token has had a learning signal for 2 steps \(mean reward .*\), so .*: {cause} 100%\. "
SAME_REWARD = "The reward function 'always_one' has given all completions the same reward for 2 steps"


@pytest.mark.parametrize(
    ("trainer_class", "reward", "options", "expected"),
    [
        (MultimodalGRPOTrainer, equal_in_a_group, {}, "equal_rewards"),
        (MultimodalGRPOTrainer, always_one, {}, "equal_rewards"),
        (MultimodalRLOOTrainer, always_one, {}, "equal_rewards"),
        (MultimodalGRPOTrainer, equal_in_a_group, {"scale_rewards": "batch"}, "equal_rewards"),
        # The KL divergence from a reference, in the reward, isn't a signal of rewards; TRL's metric sees it
        (MultimodalRLOOTrainer, always_one, {"beta": 0.5}, "equal_rewards"),
        (MultimodalRLOOTrainer, equal_in_a_group, {"beta": 0.5}, "equal_rewards"),
        (MultimodalGRPOTrainer, equal_in_a_group, {"beta": 0.5, "kl_estimator": "k1"}, "equal_rewards"),
        (MultimodalGRPOTrainer, always_one, {"advantage_estimator": "reinforce"}, "equal_rewards"),
        (MultimodalPPOTrainer, equal_in_a_group, {}, None),  # the critic's values differ from equal rewards
        (MultimodalPPOTrainer, always_one, {}, SAME_REWARD),
        (MultimodalGRPOTrainer, varied, {"reward_clip_range": (0.0, 1.0), "num_generations": 4}, None),
        (MultimodalGRPOTrainer, varied, {"reward_clip_range": (-2.0, 0.0)}, "clipped_rewards"),
        (MultimodalRLOOTrainer, varied, {"reward_clip_range": (-2.0, 0.0)}, "clipped_rewards"),
        (MultimodalGRPOTrainer, varied, ENDLESS, "truncation"),
    ],
)
def test_a_run_warns_once(trainer_class, reward, options, expected, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    monkeypatch.setattr(rollout_logs.SignalHint.__init__, "__defaults__", (False, 2))
    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    options = {"max_steps": 3, "logging_steps": 1, "self_check": False, **options}
    objects = moved("qwen2_5_vl") if "beta" in options else None
    trainer = make_trainer(trainer_class, "qwen2_5_vl", rows, tmp_path, reward=reward, objects=objects, **options)
    trainer.train()
    if "beta" in options and trainer_class is MultimodalRLOOTrainer:
        assert trainer.state.log_history[0]["frac_reward_zero_std"] < 1
    assert len(warned) == (expected is not None)
    assert all(re.match(expected if " " in expected else NO_SIGNAL.format(cause=expected), each) for each in warned)


def test_shares_of_a_run_sum_to_1(tmp_path):
    """Over all ranks' sampled tokens, of which a third is in groups with equal rewards."""

    def reward(prompts, completions, **kwargs):
        return [float(len(str(prompt)) > 40) * (i % 4) for i, prompt in enumerate(prompts)]

    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    options = {"max_steps": 4, "logging_steps": 1, "num_iterations": 2, "learning_rate": 0.5, "self_check": False}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path, reward=reward, **options)
    trainer.train()
    for logs in trainer.state.log_history[:4]:
        account = {name: logs[f"signal/{name}"] for name in ("tokens", *CAUSES)}
        assert sum(account.values()) == pytest.approx(1)
        assert logs["signal/tokens"] <= 1 and logs["signal/completions"] >= 0
    assert any(logs["signal/equal_rewards"] > 0 for logs in trainer.state.log_history[:4])
    assert any(logs["signal/trust_region"] > 0 for logs in trainer.state.log_history[:4])


def test_a_function_that_rewards_all_alike_is_named_after_eight_steps(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    for steps in (7, 8):
        options = {"max_steps": steps, "logging_steps": 1, "self_check": False, "reward": [varied, always_one]}
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / str(steps), **options).train()
        assert len(warned) == (steps == 8)
    assert "'always_one' has given all completions the same reward for 8 steps (1)" in warned[0]


def test_groups_with_too_few_rewards_to_compare_are_counted(tmp_path):
    """Of 4 completions, one has no reward, and sets of 3 others are all alike."""

    def reward(prompts, **kwargs):
        return [None if i % 4 == 0 else float(i % 4) for i in range(len(prompts))]

    rows = Dataset.from_list([{"prompt": "What? " + "Really? " * i} for i in range(8)])
    options = {"max_steps": 1, "logging_steps": 1, "self_check": False, "advantage_estimator": "pass_at_k(k=3)"}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path, reward=reward, **options)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["signal/tokens"] == logs["signal/equal_rewards"] == 0
    assert logs["signal/estimator"] + logs["signal/no_reward"] == pytest.approx(1)
    assert logs["signal/estimator"] > 0.4 and logs["signal/no_reward"] > 0.05
