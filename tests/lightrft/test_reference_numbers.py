# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Numbers of LightRFT's experience maker, from its definitions written as plain loops over tokens in float64.

No function of this package computes an expected value here. Masks are random: completions end early.
"""

import math
import random

import pytest
import torch
from helpers.trainer_utils import load
from torch.testing import assert_close

from trl_multimodal_rft.algorithms.kl import FixedKLController
from trl_multimodal_rft.lightrft import Actor
from trl_multimodal_rft.lightrft.trainer.experience import Experience
from trl_multimodal_rft.lightrft.trainer.experience_config import ExperienceConfig
from trl_multimodal_rft.lightrft.trainer.experience_maker import NaiveExperienceMaker


N = 4  # completions per prompt
SIZES = (8, 8, 4)  # samples of each experience; five prompts
NORMALIZED = ("gae", "reinforce", "reinforce_baseline")


# The definitions


def shaped_rewards(estimator, rewards):
    """Returns rewards relative to those of their group."""
    shaped = []
    for start in range(0, len(rewards), N):
        group = rewards[start : start + N]
        mean = sum(group) / N
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (N - 1))
        for r in group:
            if estimator == "rloo":
                shaped.append(r - (sum(group) - r) / (N - 1))
            elif estimator in ("group_norm", "grpo"):
                shaped.append((r - mean) / (deviation + 1e-8))
            elif estimator == "reinforce_baseline":
                shaped.append(r - mean)
            else:
                shaped.append(r)
    return shaped


def rewards_of_tokens(reward, divergences, coefficient, clip):
    """Returns the negative penalty of each token, and the clipped reward on the last one."""
    if clip is not None:
        reward = min(max(reward, clip[0]), clip[1])
    per_token = [-coefficient * divergence for divergence in divergences]
    per_token[-1] += reward
    return per_token


def discounted_sums(rewards, gamma):
    sums = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        sums.append(later)
    return sums[::-1]


def gae_of_tokens(rewards, values, gamma, lambd):
    advantages = []
    later = 0.0
    next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * lambd * later
        next_value = value
        advantages.append(later)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def normalized(rows):
    numbers = [number for row in rows for number in row]
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    return [[(x - mean) / deviation for x in row] for row in rows]


def divergence(logp, base, k3):
    difference = logp - base
    return math.exp(-difference) - 1 + difference if k3 else difference


def by_definition(estimator, samples, *, coefficient, gamma, lambd, clip, k3):
    """Returns advantages, returns and sums of token rewards of samples (rewards, logps, base logps, values)."""
    shaped = shaped_rewards(estimator, [sample[0] for sample in samples])
    all_advantages = []
    all_returns = []
    sums = []
    for reward, (_, logps, base, values) in zip(shaped, samples, strict=True):
        divergences = [divergence(a, b, k3) for a, b in zip(logps, base, strict=True)]
        per_token = rewards_of_tokens(reward, divergences, coefficient, clip)
        if estimator == "gae":
            advantages, returns = gae_of_tokens(per_token, values, gamma, lambd)
        else:
            advantages = returns = discounted_sums(per_token, gamma)
        all_advantages.append(advantages)
        all_returns.append(returns)
        sums.append(sum(per_token))
    return normalized(all_advantages) if estimator in NORMALIZED else all_advantages, all_returns, sums


# The maker


class Recorded(NaiveExperienceMaker):
    """A maker with recorded experiences instead of those of its policy."""

    recorded: list[Experience]

    def generate_samples(self, all_prompts, **generate_kwargs):
        return self.recorded

    def make_experience(self, samples):
        return samples


def random_samples(seed, rewards=None):
    draw = random.Random(seed)
    samples = []
    for index in range(sum(SIZES)):
        length = draw.randint(1, 9)
        numbers = [[draw.gauss(0, 1) for _ in range(length)] for _ in range(3)]
        samples.append((draw.choice([0.1, 0.5, 1, -2]) if rewards is None else rewards[index], *numbers))
    return samples


def experiences_of(samples, k3):
    """Returns padded experiences in float64 of samples, with masks and the KL divergence of each token."""
    experiences = []
    start = 0
    for size in SIZES:
        part = samples[start : start + size]
        start += size
        width = max(len(sample[1]) for sample in part)
        mask = torch.tensor([[1] * len(s[1]) + [0] * (width - len(s[1])) for s in part]).bool()

        def padded(index, part=part, width=width):
            return torch.tensor([s[index] + [0.0] * (width - len(s[index])) for s in part], dtype=torch.float64)

        kl = [[divergence(a, b, k3) for a, b in zip(s[1], s[2], strict=True)] for s in part]
        experiences.append(
            Experience(
                sequences=torch.ones(size, width + 2, dtype=torch.long),
                action_log_probs=padded(1),
                base_action_log_probs=padded(2),
                values=padded(3),
                attention_mask=torch.ones(size, width + 2, dtype=torch.long),
                action_mask=mask,
                info={
                    "reward": torch.tensor([float(s[0]) for s in part], dtype=torch.float64),
                    "response_length": mask.sum(1).float(),
                    "num_actions": width,
                },
                kl=torch.tensor([row + [0.0] * (width - len(row)) for row in kl], dtype=torch.float64),
            )
        )
    return experiences


def maker(coefficient=0.0, **options):
    model, words = load("qwen2_5_vl")
    config = ExperienceConfig(n_samples_per_prompt=N, progress=False, **options)
    critic = torch.nn.Identity() if config.estimator.name == "gae" else None
    policy = Actor(model, bf16=False)
    controller = FixedKLController(coefficient)
    arguments = (policy, critic, None, None, words.tokenizer, 64, controller, config)
    return Recorded(*arguments, reward_fn=lambda completions: [0.0] * len(completions), processor=words)


def rows_of(experiences, name):
    return [
        row[mask].tolist()
        for experience in experiences
        for row, mask in zip(getattr(experience, name), experience.action_mask, strict=True)
    ]


def assert_rows_close(found, expected):
    assert [len(row) for row in found] == [len(row) for row in expected]
    found, expected = (
        torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in (found, expected)
    )
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


ESTIMATORS = ("rloo", "group_norm", "grpo", "reinforce_baseline", "reinforce", "cpgd", "gae")


@pytest.mark.parametrize("clip", [None, (-0.4, 0.6)])
@pytest.mark.parametrize("coefficient, k3", [(0.0, False), (0.3, False), (0.3, True)])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_and_returns_are_those_of_the_definitions(estimator, coefficient, k3, clip):
    for seed, gamma, lambd in [(0, 1.0, 0.95), (1, 0.9, 0.7), (2, 0.35, 1.0)]:
        samples = random_samples(seed)
        settings = {"kl_estimator": "k3" if k3 else "k1", "reward_clip_range": clip}
        made = maker(coefficient, advantage_estimator=estimator, **settings)
        made.recorded = experiences_of(samples, k3)
        discounts = {"gamma": gamma, "lambd": lambd} if estimator == "gae" else {"gamma": gamma}
        experiences = made.make_experience_list(["Hello"], **discounts)
        options = {"coefficient": coefficient, "gamma": gamma, "lambd": lambd, "clip": clip, "k3": k3}
        advantages, returns, sums = by_definition(estimator, samples, **options)
        assert_rows_close(rows_of(experiences, "advantages"), advantages)
        assert_rows_close(rows_of(experiences, "returns"), returns)
        assert_rows_close([torch.cat([each.info["return"] for each in experiences]).tolist()], [sums])
        for each in experiences:
            assert each.kl is None and "num_actions" not in each.info
            assert not each.advantages[~each.action_mask].any()
        found_rewards = torch.cat([each.info["reward"] for each in experiences]).tolist()
        assert found_rewards == [sample[0] for sample in samples]  # as they came


def test_three_actions_are_discounted():
    made = maker(advantage_estimator="cpgd")
    samples = [(1.0, [0.0] * 3, [0.0] * 3, [0.0] * 3)] * sum(SIZES)
    made.recorded = experiences_of(samples, False)
    for each in made.make_experience_list(["Hello"], gamma=0.9):
        assert_close(each.advantages, torch.tensor([[0.81, 0.9, 1.0]] * len(each.sequences), dtype=torch.float64))


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3])
@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "reinforce_baseline"])
def test_equal_rewards_of_a_group_are_no_advantage(estimator, reward):
    """In float32, a sum over equal rewards rounds, and a division by 1e-8 would make the rounding an advantage."""
    made = maker(advantage_estimator=estimator)
    made.recorded = experiences_of(random_samples(0, [reward] * sum(SIZES)), False)
    for each in made.recorded:
        each.info["reward"] = each.info["reward"].float()
    for each in made.make_experience_list(["Hello"], gamma=0.9):
        assert not each.advantages.any() and not each.returns.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unscorable_completions_are_left_out(estimator):
    """They have no advantage, in spite of the divergence, and the others of their group are compared without them."""
    samples = random_samples(4)
    samples[1] = (math.nan, *samples[1][1:])
    made = maker(0.3, advantage_estimator=estimator)
    made.recorded = experiences_of(samples, False)
    experiences = made.make_experience_list(["Hello"], gamma=0.9)
    advantages = rows_of(experiences, "advantages")
    assert not any(advantages[1]) and all(map(any, advantages[2:]))
    assert all(math.isfinite(number) for row in advantages for number in row)


def test_no_divergence_in_rewards():
    made = maker(0.3, advantage_estimator="rloo", kl_in_reward=False)
    samples = random_samples(3)
    made.recorded = experiences_of(samples, False)
    experiences = made.make_experience_list(["Hello"], gamma=0.9)
    options = {"coefficient": 0.0, "gamma": 0.9, "lambd": 1.0, "clip": None, "k3": False}
    assert_rows_close(rows_of(experiences, "returns"), by_definition("rloo", samples, **options)[1])


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "gae"])
def test_lambda_belongs_to_gae(estimator):
    """Other estimators ignore it, as LightRFT's scripts always pass it."""
    returns = []
    for options in ({}, {"lambd": 0.5}):
        made = maker(advantage_estimator=estimator)
        made.recorded = experiences_of(random_samples(0), False)
        returns.append(rows_of(made.make_experience_list(["Hello"], gamma=0.9, **options), "returns"))
    assert_rows_close(*returns)
    with pytest.raises(ValueError, match="`lambd` must be between 0 and 1"):
        made.make_experience_list(["Hello"], lambd=1.5)


@pytest.mark.parametrize("discounts", [{"gamma": 1.5}, {"gamma": "0.9"}, {"gamma": True}, {"gamma": float("nan")}])
def test_discounts_are_numbers_between_0_and_1(discounts):
    with pytest.raises(ValueError, match="`gamma` must be"):
        maker(advantage_estimator="rloo").make_experience_list(["Hello"], **discounts)


@pytest.mark.parametrize(
    "estimator, word",
    [
        ("group_norm(scale='none')", "scale"),
        ("cpgd(weight='std')", "weight"),
        ("reinforce_baseline(norm_level='sequence')", "norm_level"),
    ],
)
def test_settings_without_effect_are_errors(estimator, word):
    with pytest.raises(ValueError, match=f"`{word}` of `advantage_estimator=.*` has no effect"):
        ExperienceConfig(estimator)


@pytest.mark.parametrize("option", ["bootstrap_truncated", "no_advantage_std_norm"])
def test_options_without_effect_are_errors(option):
    with pytest.raises(
        ValueError, match=f"`{option}` has no effect with `advantage_estimator='rloo'`, only with 'gae'"
    ):
        ExperienceConfig("rloo", **{option: True})
    ExperienceConfig("gae", **{option: True})


@pytest.mark.parametrize("estimator", ["online_dpo", "turn_norm", "gigpo(omega=2.0)"])
def test_other_estimators_have_their_trainer(estimator):
    with pytest.raises(ValueError, match="needs `MultimodalGRPOTrainer`"):
        ExperienceConfig(estimator)
