# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards along completions against formulas of the papers written by hand, and plain forwards in float64."""

import asyncio
import math
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from engines.test_asynchronous import make as make_ahead
from helpers.samplers import PseudoRandom, Wrapped
from helpers.tools import RLOO, Scripted
from helpers.trainer_utils import InjectedOurs, image_rows, logged, make_trainer
from rollout.test_contexts import Album, Recorded, check_update, plain_update, train
from torch.testing import assert_close

from trl_multimodal_rft.algorithms.advantages import as_estimator, estimate_advantages
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer
from trl_multimodal_rft.rewards.calls import StepwiseReward, check_rewards
from trl_multimodal_rft.rollout.estimates import join_steps
from trl_multimodal_rft.trainers.sampling import rollout_logs


pytestmark = pytest.mark.gate


NAN = math.nan
EPS = 1e-4

# What reward functions return


@pytest.mark.parametrize(
    ("reward", "steps"),
    [
        ([1, 2.5], ((3, 1.0), (8, 2.5))),
        (torch.tensor([1.0, 2.5]), ((3, 1.0), (8, 2.5))),
        ([(1, 1.0), [torch.tensor(7), torch.tensor(2.5)]], ((1, 1.0), (7, 2.5))),
    ],
)
def test_steps_are_rewarded(reward, steps):
    found, none, plain = check_rewards([reward, None, 0.5], 3, "seen", turns=[[(0, 4), (6, 9)]] * 3)
    assert (found, found.steps, none, plain) == (3.5, steps, None, 0.5)


def test_arrays_are_steps_of_a_completion_with_one_turn_too():
    turns = [[(0, 4)], [(0, 4), (6, 9)]]
    short, long = check_rewards([np.array([0.5]), np.array([1.0, 2.5])], 2, "seen", turns=turns)
    assert (short.steps, long.steps) == (((3, 0.5),), ((3, 1.0), (8, 2.5)))
    assert check_rewards([torch.tensor([0.5])] * 2, 2, "seen", turns=turns) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ([1.0], "rewards of 1 turns for row 7, whose completion has 2; return one number per turn, or (last token, "),
        ([], "rewards of 0 turns for row 7, whose completion has 2"),
        ([(True, 8.0)], "the step (True, 8.0) for row 7"),
        ([1.0, NAN], "the step (8, nan) for row 7; return pairs (index of a sampled token, finite number)"),
        ([1.0, None], "the step (8, None) for row 7"),
        ([3e38, 3e38], "6e+38 for row 7; return a finite number"),
        ([(5, 1.0)], "the step (5, 1.0) for row 7"),
        ([(8, 1.0), (3, 1.0)], "the step (3, 1.0) for row 7"),
        ([(3.0, 1.0)], "the step (3.0, 1.0) for row 7"),
        ([(3, 1.0, 2)], "the step (3, 1.0, 2) for row 7"),
        ([(3, 1.0), 2.0], "the step 2.0 for row 7"),
    ],
)
def test_wrong_steps_are_named(reward, problem):
    with pytest.raises(ValueError, match=f"^The reward function 'seen' returned {re.escape(problem)}.*$"):
        check_rewards([0.0, reward], 2, "seen", rows=[6, 7], turns=[[(0, 4), (6, 9)]] * 2)


# Estimators. The references take trajectories: a group, turns with their last token, rewards by step, the outcome

SPANS = [(0, 4), (6, 9), (11, 13)]


def trajectories(seed, n=8, groups=2):
    """Random trajectories: turns, of which the first may have two steps, unrewarded steps, and one without a score."""
    random = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (), generator=random))

    found = []
    for i in range(n):
        n_turns = 1 + draw(3)
        steps = [(stop - 1, turn, draw(5) / 4 if draw(4) else NAN) for turn, (_, stop) in enumerate(SPANS[:n_turns])]
        if draw(2):
            steps = [(1, 0, draw(5) / 4), *steps]
        states = [f"prompt {i % groups}", *(f"result {draw(2)}" for _ in range(n_turns - 1))]
        found.append({"group": i % groups, "steps": steps, "outcome": float(draw(2)), "states": states})
    found[3]["outcome"] = NAN
    found[3]["steps"] = [(end, turn, NAN) for end, turn, _ in found[3]["steps"]]
    return found


def tensors(given) -> dict:
    mask = torch.zeros(len(given), 14)
    for row, each in zip(mask, given, strict=True):
        for start, stop in SPANS[: len(each["states"])]:
            row[start:stop] = 1
    along = [[(end, reward) for end, _, reward in each["steps"] if reward == reward] for each in given]
    rows = [[StepwiseReward.of(own) if own else NAN, each["outcome"]] for own, each in zip(along, given, strict=True)]
    turns = [[(stop, state) for (_, stop), state in zip(SPANS, each["states"], strict=False)] for each in given]
    per_func = torch.tensor(rows, dtype=torch.float64)
    rewards = per_func.nansum(1).masked_fill(per_func.isnan().all(1), NAN)
    joined = join_steps(rows, turns, per_func, torch.ones(2))
    ids = torch.tensor([each["group"] for each in given])
    return {"rewards": rewards, "rewards_per_func": per_func, "group_ids": ids, "mask": mask, "steps": joined}


def returns(each, discount, of_turns=False):
    """Returns by step, or turn, its number or state, which others share, the discounted sum, and the last token."""
    steps = [(end, turn, 0.0 if reward != reward else reward) for end, turn, reward in each["steps"]]
    if of_turns:
        ends = {turn: end for end, turn, _ in steps}
        steps = [(end, turn, sum(r for _, t, r in steps if t == turn)) for turn, end in ends.items()]
    rewards = [reward for *_, reward in steps]
    rewards[-1] += each["outcome"]  # NaN leaves the completion out
    totals = [sum(discount**j * reward for j, reward in enumerate(rewards[k:])) for k in range(len(rewards))]
    keys = [each["states"][turn] if of_turns else k for k, (_, turn, _) in enumerate(steps)]
    return [((each["group"], key), total, end) for key, total, (end, *_) in zip(keys, totals, steps, strict=True)]


def normalized(values, scale=True) -> list[float]:
    """Values relative to those with an equal key, 0 if they or the others can't tell."""
    groups = defaultdict(list)
    found = []
    for key, value in values:
        groups[key] += [value] if value == value else []
    for key, value in values:
        group = groups[key]
        if value != value or max(group) == min(group):
            found.append(0.0)
        else:
            found.append((value - statistics.mean(group)) / (statistics.stdev(group) + EPS if scale else 1.0))
    return found


def on_tokens(steps, mask) -> torch.Tensor:
    """Gives each token of the mask the advantage of the first step that ends with it or behind it."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row, own in zip(found, steps, strict=True):
        for end, value in reversed(own):
            row[: end + 1] = value
    return found * mask


def slow_turn_norm(given, discount, of_turns=False, scale=True):
    steps = [returns(each, discount, of_turns) for each in given]
    values = iter(normalized([(key, value) for own in steps for key, value, _ in own], scale))
    return [[(end, next(values)) for *_, end in own] for own in steps]


def slow_trajectory_norm(given, discount):
    """Each trajectory counts once, by weights that are 1 over its number of steps."""
    found = []
    for each in given:
        others = [other for other in given if other["group"] == each["group"] and other["outcome"] == other["outcome"]]
        group = [[value for _, value, _ in returns(other, discount)] for other in others]
        mean = statistics.mean(map(statistics.mean, group))
        squares = sum(statistics.mean((value - mean) ** 2 for value in own) for own in group)
        std = math.sqrt(squares / (len(group) - 1)) + EPS
        own = returns(each, discount)
        found.append([(end, 0.0 if value != value else (value - mean) / std) for _, value, end in own])
    return found


def slow_gigpo(given, discount, omega, scale):
    totals = [(each["group"], sum(r for *_, r in each["steps"] if r == r) + each["outcome"]) for each in given]
    pairs = zip(normalized(totals, scale), slow_turn_norm(given, discount, True, scale), strict=True)
    return [[(end, total + omega * value) for end, value in own] for total, own in pairs]


def slow_ps_grpo(given, gamma, rho):
    outcomes = []
    for each in given:
        rewards = [reward for *_, reward in each["steps"] if reward == reward]
        dropped = any(a > 0 and (a - b) / a >= rho for a, b in pairwise(rewards))
        outcomes.append((each["group"], 1 - gamma if each["outcome"] == 1 and dropped else each["outcome"]))
    return normalized(outcomes)


@pytest.mark.parametrize("seed", range(6))
def test_estimators_are_those_of_their_papers(seed):
    given = trajectories(seed)
    inputs = tensors(given)

    by_token = {
        "turn_norm": slow_turn_norm(given, 1.0),
        "turn_norm(turn_discount=0.9)": slow_turn_norm(given, 0.9),
        "turn_norm(turn_discount=0.9, norm='trajectory')": slow_trajectory_norm(given, 0.9),
        "gigpo": slow_gigpo(given, 0.95, 1.0, True),
        "gigpo(turn_discount=0.5, omega=0.3, norm='none')": slow_gigpo(given, 0.5, 0.3, False),
    }
    expected = {name: on_tokens(steps, inputs["mask"]) for name, steps in by_token.items()}
    for gamma, rho in ((0.5, 0.3), (0.2, 0.5)):  # rewards are quarters, so some drop by exactly a half
        expected[f"ps_grpo(gamma={gamma}, rho={rho})"] = torch.tensor(
            slow_ps_grpo(given, gamma, rho), dtype=torch.float64
        )
    for name, advantages in expected.items():
        assert_close(estimate_advantages(name, **inputs), advantages, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["turn_norm", "turn_norm(norm='trajectory')", "gigpo"])
def test_equal_trajectories_have_no_advantage(name):
    (one, *_) = trajectories(1)
    steps = [(stop - 1, turn, 0.1 * turn) for turn, (_, stop) in enumerate(SPANS)]
    given = [{**one, "group": 0, "steps": steps, "states": ["a", "b", "c"], "outcome": 1.0}] * 4
    assert not estimate_advantages(name, **tensors(given)).any()


@pytest.mark.parametrize("turns", [[[(3, "a")], [], [(2, "a")]], [[], [], []]])
def test_a_completion_without_tokens_is_compared_by_its_outcome(turns):
    rewards = torch.tensor([[1.0], [0.0], [0.5]])
    mask = torch.zeros(3, 3)
    for row, own in zip(mask, turns, strict=True):
        row[: own[0][0] if own else 0] = 1
    given = {"rewards": rewards[:, 0], "rewards_per_func": rewards, "group_ids": torch.zeros(3).long(), "mask": mask}
    steps = join_steps(rewards.tolist(), turns, rewards, torch.ones(1))
    expected = estimate_advantages("group_norm", **given)[:, None] * mask
    for name in ("turn_norm", "turn_norm(norm='trajectory')", "gigpo(omega=0.0)"):
        assert_close(estimate_advantages(name, steps=steps, **given), expected)


def test_outcomes_are_weighted_and_take_the_bonus():
    given = [[StepwiseReward.of([(3, 1.0), (8, 2.0)]), StepwiseReward.of([(8, 0.5)]), 1.0], [None, 4.0, None]]
    per_func = torch.tensor([[3.0, 0.5, 1.0], [NAN, 4.0, NAN]])
    turns = [[(4, "a"), (9, "b")], [(4, "a")]]
    found = join_steps(given, turns, per_func, torch.tensor([0.5, 2.0, 10.0]), torch.tensor([0.25, 0.0]))
    assert found.steps == [[(3, 0, 0.5, 0), (8, 1, 2.0, 1)], [(3, 0, None, 0)]]
    assert found.outcomes.tolist() == [10.25, 8.0]
    alone = join_steps([[*given[0][:2], NAN]], turns[:1], torch.tensor([[3.0, 0.5, NAN]]), torch.ones(3))
    with pytest.raises(ValueError, match="^`advantage_estimator='ps_grpo'` needs a reward function of whole"):
        as_estimator("ps_grpo").function(torch.ones(1), torch.zeros(1).long(), alone)


# Runs. Completion i calls a tool `Scripted.turns[i]` times


def by_turn(i, n):
    return [(7 * i + 3 * turn) % 5 / 4 for turn in range(n + 1)]


def of_turns(completions, **kwargs):
    return [by_turn(i, sum(m["role"] == "tool" for m in each)) for i, each in enumerate(completions)]


async def halves(completion_ids, **kwargs):
    """Rewards the second token, and doesn't apply to the first completion."""
    await asyncio.sleep(0)
    return [[(1, 0.1 * i)] if i else None for i in range(len(completion_ids))]


def outcome(completions, **kwargs):
    return [float(i % 3 == 0) for i in range(len(completions))]


@pytest.mark.parametrize(
    ("most", "estimator", "formula"),
    [
        (None, "turn_norm(turn_discount=0.9)", lambda given: slow_turn_norm(given, 0.9)),
        (1, "gigpo", lambda given: slow_gigpo(given, 0.95, 1.0, True)),
    ],
)
def test_rewards_of_turns_reach_the_update(most, estimator, formula):
    """The update is the gradient of a plain float64 forward of each context, with advantages by hand."""
    options = {"advantage_estimator": estimator, "max_context_media": most, "self_check": False}
    result = train(reward=[of_turns, halves, outcome], reward_weights=[1.0, 0.5, 2.0], **options)
    draw = result.trainer.draws[0]
    in_loss = (draw.batch["completion_mask"] * draw.batch["tool_mask"]).bool()
    given = []
    for i, turns in enumerate(draw.batch.source.turns):
        own = by_turn(i, Scripted.turns[i])
        steps = [(1, 0, 0.05 * i)] if i else []
        steps += [(turn.stop - 1, number, own[number]) for number, turn in enumerate(turns)]
        states = [f"prompt {i // 4}", *(f"result {number}" for number in range(len(turns) - 1))]
        given.append({"group": i // 4, "steps": steps, "states": states, "outcome": 2.0 * (i % 3 == 0)})
    advantages = on_tokens(formula(given), in_loss)
    assert_close(draw.batch["advantages"].double(), advantages, rtol=0, atol=1e-5)
    assert all(row[own].unique().numel() > 1 for row, own in zip(advantages[1:5], in_loss[1:5], strict=True))

    check_update(result, plain_update("qwen3_vl", draw, 99 if most is None else most, advantages / in_loss.sum())[0])

    # Logs have the sums, and the means of turns over the completions that have them
    totals = [[sum(by_turn(i, n)), 0.1 * i if i else NAN, float(i % 3 == 0)] for i, n in enumerate(Scripted.turns)]
    assert_close(draw.rewards, torch.tensor(totals), equal_nan=True)
    for number in range(5):
        own = [by_turn(i, n)[number] for i, n in enumerate(Scripted.turns) if n >= number]
        assert logged(result, f"rewards/of_turns/turn_{number + 1}") == [pytest.approx(statistics.mean(own))]
    assert logged(result, "rewards/halves/turn_1") == [pytest.approx(0.4)]
    keys = [key for key in result.history[0] if "/turn_" in key]
    assert len(keys) == 6 and logged(result, "rewards/halves/mean") == [pytest.approx(0.4)]


def always(completion_ids, **kwargs):
    return [1.0] * len(completion_ids)


def rising(completion_ids, **kwargs):
    return [[(0, 0.01 * (ids[0] % 7)), (len(ids) - 1, 0.5)] for ids in completion_ids]


def swapped(completion_ids, **kwargs):
    """Rewards of equal sums, which fall within every other completion."""
    return [[(0, float(i % 2)), (len(ids) - 1, float(1 - i % 2))] for i, ids in enumerate(completion_ids)]


@pytest.mark.parametrize(
    ("estimator", "rewards", "learns"),
    [
        ("turn_norm", [swapped], True),
        ("ps_grpo", [always, swapped], True),
        ("ps_grpo", [always, rising], False),
        ("gigpo", [swapped], False),  # without tools, a completion is a turn
    ],
)
def test_a_group_has_signal_where_an_advantage_is_not_0(estimator, rewards, learns, tmp_path, monkeypatch):
    """For dynamic sampling, replay, hints and logs, whatever the sums of rewards are."""
    warned = []
    options = {"dynamic_sampling": 2, "replay_buffer_size": 2, "max_steps": 2, "logging_steps": 1}
    monkeypatch.setattr(rollout_logs.logger, "warning", warned.append)
    monkeypatch.setattr(rollout_logs.SignalHint.__init__, "__defaults__", (False, 2))
    options |= {"advantage_estimator": estimator, "reward": rewards}
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", image_rows(), tmp_path, **options)
    trainer.train()
    for logs in trainer.state.log_history[:2]:
        assert logs["sampling/kept_frac"] == 1 - logs["frac_reward_zero_std"] == learns == (logs["grad_norm"] > 0)
        assert logs["sampling/rounds"] == 2 - learns and logs["packing/skipped_frac"] == 1 - learns
    assert len(trainer._batches.groups.replay) == 2 * learns and len(warned) == (not learns)
    assert learns or "No token has had a learning signal for 2 steps" in warned[0]


@pytest.mark.parametrize("every", [3, 1])
def test_completions_without_tokens_train_nothing_and_count_as_clipped(every, tmp_path):
    class Empties(PseudoRandom):
        def __call__(self, *args, **options):
            return [each if i % every else [] for i, each in enumerate(super().__call__(*args, **options)[0])], None

    def reward(completions, completion_ids, **kwargs):
        return [[float(i)] if ids else [] for i, ids in enumerate(completion_ids)]

    options = {"advantage_estimator": "turn_norm", "max_steps": 1, "sampler": Empties, "reward": reward}
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", image_rows(), tmp_path, **options)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert (logs["grad_norm"] > 0) == (every == 3) and logs["completions/min_length"] == 0
    assert logs["completions/clipped_ratio"] >= (3 / 8 if every == 3 else 1)


def test_environments_reward_turns_and_rloo_their_sum():
    result = train(RLOO, environment=Album)
    totals = torch.tensor([0.25 * n + 1 for n in Scripted.turns]).view(2, 4)
    expected = (totals - (totals.sum(1, keepdim=True) - totals) / 3).flatten()
    assert_close(result.trainer.inputs["advantages"], expected)
    assert logged(result, "rewards/Album/turn_2") == [pytest.approx(0.25 * 4 / 6 + 2 / 6)]
    rooms = []

    class Measured(Wrapped):
        def __call__(self, model, prompts, *, room=None, **options):
            rooms.append(room)
            return super().__call__(model, prompts, room=room, **options)

    result.trainer.sampler = Measured(result.trainer)
    args = EvaluationConfig(max_completion_length=1500, batch_size=4)
    found = evaluate_trainer(result.trainer, image_rows(4), args=args)
    assert [each["reward/Album"] for each in found.rows] == [[1.0], [1.25], [1.5], [1.75]]
    # The sampler gets the tokens that are left after each turn, as in training
    first, *later = rooms
    assert first is None and [len(room) for room in later] == [3, 2, 1]
    assert 1500 > max(later[0]) >= min(later[0]) > max(later[1]) > max(later[2]) > 0


@pytest.mark.parametrize("estimator", ["turn_norm", "gigpo", "ps_grpo"])
def test_estimators_of_steps_need_rewards_along_completions(estimator, tmp_path):
    options = {"reward": outcome, "advantage_estimator": estimator}
    with pytest.raises(ValueError, match="reads rewards of steps, and the first batch has none; let a"):
        make_trainer(Recorded, "qwen2_5_vl", image_rows(), tmp_path, **options).train()
    if estimator == "gigpo":  # whose second term compares discounted outcomes of turns
        assert len(train(**options).trainer.draws) == 1


def test_requested_completions_are_rewarded_early(tmp_path):
    """Without tools, a completion is one turn, whose steps are rewarded while the policy is trained."""

    async def early(completion_ids, **kwargs):
        return [[(1, ids[0] / 100), (len(ids) - 1, ids[1] / 100)] for ids in completion_ids]

    trainer = make_ahead(tmp_path, Recorded, reward=early, advantage_estimator="turn_norm", max_steps=2)
    trainer.train()
    for draw in trainer.draws:
        ids = draw.batch["completion_ids"].tolist()
        steps = [[(1, 0, own[0] / 100), (len(own) - 1, 0, own[1] / 100)] for own in ids]
        given = [{"group": i // 4, "steps": each, "outcome": 0.0} for i, each in enumerate(steps)]
        expected = on_tokens(slow_turn_norm(given, 1.0), draw.batch["completion_mask"])
        assert_close(draw.batch["advantages"].double(), expected, rtol=0, atol=1e-5)
