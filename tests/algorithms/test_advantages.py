# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages and rewards against hand-computed numbers, slow loops, TRL's formulas, and invariances."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trl_multimodal_rft.algorithms.advantages import (
    ALIASES,
    ESTIMATORS,
    cpgd,
    dr_grpo,
    estimate_advantages,
    gae,
    group_norm,
    reinforce,
    reinforce_baseline,
    rloo,
)
from trl_multimodal_rft.algorithms.returns import cumulative_returns, terminal_rewards, whiten
from trl_multimodal_rft.algorithms.shaping import RunningScale


NAN = math.nan
INF = math.inf
properties = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def tensor(values, **options):
    return torch.tensor(values, **{"dtype": torch.float64, **options})


# Estimators with one advantage per sample. The references take lists: rewards, groups, lengths.


def slow_groups(rewards, ids):
    """Returns for each sample the scorable rewards of its group, or nothing without signal."""
    result = []
    for reward, own in zip(rewards, ids, strict=True):
        group = [r for r, g in zip(rewards, ids, strict=True) if g == own and not math.isnan(r)]
        signal = len(group) > 1 and max(group) > min(group) and not math.isnan(reward)
        result.append(group if signal else [])
    return result


def slow(formula):
    """Wraps a formula of the reward, the rewards of its group, all rewards, and the groups per group with signal."""

    def advantages(rewards, ids, lengths):
        groups = slow_groups(rewards, ids)
        scorable = [r for r in rewards if not math.isnan(r)]
        live = {g for g, group in zip(ids, groups, strict=True) if group}
        share = len(set(ids)) / max(len(live), 1)
        return [formula(r, g, scorable, share) if g else 0.0 for r, g in zip(rewards, groups, strict=True)]

    return advantages


def leave_one_out(reward, group, *_):
    others = list(group)
    others.remove(reward)
    return reward - statistics.mean(others)


def centred(reward, group, *_):
    return reward - statistics.mean(group)


def slow_whiten(values, weights):
    total = sum(weights) or 1
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    std = math.sqrt(sum(w * (v - mean) ** 2 for v, w in zip(values, weights, strict=True)) / total)
    return [(v - mean) / std if std > 1e-6 else 0.0 for v in values]


def slow_reinforce_baseline(level):
    def advantages(rewards, ids, lengths):
        groups = slow_groups(rewards, ids)
        values = [centred(r, g) if g else 0.0 for r, g in zip(rewards, groups, strict=True)]
        weights = [
            0 if math.isnan(r) else (n if level == "token" else 1) for r, n in zip(rewards, lengths, strict=True)
        ]
        return [w if g else 0.0 for w, g in zip(slow_whiten(values, weights), groups, strict=True)]

    return advantages


GROUP_CASES = {
    "group_norm": (
        lambda r, g, m: group_norm(r, g),
        slow(lambda r, group, *_: centred(r, group) / (statistics.stdev(group) + 1e-4)),
    ),
    "group_norm batch": (
        lambda r, g, m: group_norm(r, g, scale="batch"),
        slow(lambda r, group, scorable, _: centred(r, group) / (statistics.stdev(scorable) + 1e-4)),
    ),
    "dr_grpo": (lambda r, g, m: dr_grpo(r, g), slow(centred)),
    "rloo": (lambda r, g, m: rloo(r, g), slow(leave_one_out)),
    "cpgd none": (lambda r, g, m: cpgd(r, g, weight="none"), slow(centred)),
    "cpgd std": (
        lambda r, g, m: cpgd(r, g, weight="std"),
        slow(lambda r, group, *_: centred(r, group) / (statistics.pstdev(group) + 1e-6)),
    ),
    "cpgd clip_filter_like": (
        lambda r, g, m: cpgd(r, g),
        slow(lambda r, group, _, share: centred(r, group) * min(share, 3)),
    ),
    "reinforce_baseline token": (reinforce_baseline, slow_reinforce_baseline("token")),
    "reinforce_baseline sequence": (
        lambda r, g, m: reinforce_baseline(r, g, m, norm_level="sequence"),
        slow_reinforce_baseline("sequence"),
    ),
}
every_group_estimator = pytest.mark.parametrize("name", GROUP_CASES)

on_grid = st.integers(-20, 20).map(lambda x: x / 10)
groups = st.sampled_from([0, 1, 2**60, -(2**60)])
batches = st.lists(st.tuples(on_grid | st.just(NAN), groups, st.integers(0, 5)), min_size=1, max_size=14)


def unpack(samples):
    rewards, ids, lengths = zip(*samples, strict=True)
    return tensor(rewards), torch.tensor(ids), torch.arange(5) < torch.tensor(lengths)[:, None]


@every_group_estimator
@properties
@given(samples=batches)
def test_group_estimator_equals_loop(name, samples):
    fast, reference = GROUP_CASES[name]
    assert_close(fast(*unpack(samples)), tensor(reference(*zip(*samples, strict=True))), rtol=1e-9, atol=1e-9)


@every_group_estimator
@pytest.mark.parametrize("constant", [0.1, 0.3, 0.7, 0.9, 1 / 3])
def test_constant_group_gets_exactly_0(name, constant):
    """Covers a neighbouring group with signal, unequal lengths, and equal rewards from sums in other orders."""
    for n in range(2, 17):
        rewards = tensor([1, 0, *[constant] * n], dtype=torch.float32)
        rewards[-1] = rewards[-1] + 0.6 - 0.6
        ids = torch.tensor([0, 0, *[1] * n])
        mask = torch.arange(20) < torch.arange(1, n + 3)[:, None]
        result = GROUP_CASES[name][0](rewards, ids, mask)
        assert result.dtype == torch.float32 and (result[2:] == 0).all()
        assert result[0] > 0 > result[1]


# Token-level functions. The references take only the valid tokens of each row, as lists: the positions and values of
# padding and gaps don't matter.


def slow_returns(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def slow_gae(rewards, values, after, gamma=0.9, lam=0.8):
    states = [*values, after]
    deltas = [r + gamma * states[t + 1] - states[t] for t, r in enumerate(rewards)]
    return slow_returns(deltas, gamma * lam)


def slow_place(tokens, reward):
    return [0.0] * (len(tokens) - 1) + [reward] if tokens else []


def slow_whiten_rows(rows, absent=()):
    flat = [x for i, row in enumerate(rows) for x in row if i not in absent]
    whitened = iter(slow_whiten(flat, [1] * len(flat)))
    return [[0.0 if i in absent else next(whitened) for _ in row] for i, row in enumerate(rows)]


def slow_reinforce(kls, rewards):
    absent = [i for i, reward in enumerate(rewards) if math.isnan(reward)]
    placed = [slow_place(kl, reward) for kl, reward in zip(kls, rewards, strict=True)]
    penalised = [[r - 0.1 * k for r, k in zip(*row, strict=True)] for row in zip(placed, kls, strict=True)]
    return slow_whiten_rows([slow_returns(row, 1) for row in penalised], absent)


TOKEN_CASES = {
    "cumulative_returns": (
        lambda x, y, row, m: cumulative_returns(x, m, 0.9),
        lambda xs, ys, row: [slow_returns(x, 0.9) for x in xs],
    ),
    "gae": (
        lambda x, y, row, m: gae(x, y, m, gamma=0.9, lam=0.8)[0],
        lambda xs, ys, row: [slow_gae(x, y, 0.0) for x, y in zip(xs, ys, strict=True)],
    ),
    "gae returns, bootstrapped": (
        lambda x, y, row, m: gae(x, y, m, gamma=0.9, lam=0.8, bootstrap=row)[1],
        lambda xs, ys, row: [
            [a + v for a, v in zip(slow_gae(x, y, b), y, strict=True)] for x, y, b in zip(xs, ys, row, strict=True)
        ],
    ),
    "terminal_rewards": (
        lambda x, y, row, m: terminal_rewards(row, m),
        lambda xs, ys, row: [slow_place(x, r) for x, r in zip(xs, row, strict=True)],
    ),
    "whiten": (lambda x, y, row, m: whiten(x, m), lambda xs, ys, row: slow_whiten_rows(xs)),
    "reinforce": (
        lambda x, y, row, m: reinforce(row, m, x, torch.zeros_like(x), kl_coef=0.1),
        lambda xs, ys, row: slow_reinforce(xs, row),
    ),
    "reinforce, one unscorable": (
        lambda x, y, row, m: reinforce(torch.cat([tensor([NAN]), row[1:]]), m, x, torch.zeros_like(x), kl_coef=0.1),
        lambda xs, ys, row: slow_reinforce(xs, [NAN, *row[1:]]),
    ),
}


def random_mask(layout, generator, rows, width):
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    if layout == "gaps":
        return torch.rand(rows, width, generator=generator) < 0.7
    steps = torch.arange(width)
    return steps < lengths if layout == "right" else steps >= width - lengths


@pytest.mark.parametrize("name", TOKEN_CASES)
@pytest.mark.parametrize("layout", ["left", "right", "gaps"])
@properties
@given(seed=seeds, rows=st.integers(1, 5), width=st.sampled_from([1, 2, 5, 9, 63, 64, 65, 130]))
def test_token_function_equals_loop_wherever_tokens_stand(name, layout, seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(layout, generator, rows, width)
    # A grid, so that ties occur
    sizes = [mask.shape, mask.shape, (rows,)]
    x, y, row = (torch.randint(-10, 11, size, generator=generator).double() / 10 for size in sizes)
    garbage = tensor([NAN, INF, -INF, 1e30])[torch.randint(0, 4, mask.shape, generator=generator)]
    fast, reference = TOKEN_CASES[name]
    result = fast(torch.where(mask, x, garbage), torch.where(mask, y, garbage.flip(1)), row, mask)
    tokens = [[v[m].tolist() for v, m in zip(values, mask, strict=True)] for values in (x, y)]
    assert (result[~mask] == 0).all()
    assert_close(result[mask], tensor(sum(reference(*tokens, row.tolist()), [])), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.95, 1.0])
def test_long_returns_keep_the_precision_of_float32(gamma):
    rewards = torch.randn(2, 5000)
    mask = torch.arange(5000) < torch.tensor([[5000], [4097]])
    expected = torch.zeros(2, 5000, dtype=torch.float64)
    following = torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(5000)):
        following = expected[:, t] = torch.where(mask[:, t], rewards[:, t].double() + gamma * following, 0)
    result = cumulative_returns(rewards, mask, gamma)
    assert result.dtype == torch.float32
    assert_close(result.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("constant", [0.1, 1 / 3])
def test_whitened_equal_rewards_are_exactly_0(constant):
    for n in range(1, 17):
        mask = torch.arange(20) < torch.arange(1, n + 1)[:, None]
        assert (reinforce(tensor([constant] * n), mask) == 0).all()


def test_float32_is_whitened_in_float64():
    values = 1e4 + torch.arange(200.0).view(4, 50) / 100
    mask = torch.ones(4, 50)
    assert_close(whiten(values, mask).double(), whiten(values.double(), mask), rtol=0, atol=1e-5)


# `estimate_advantages`


def rollout():
    generator = torch.Generator().manual_seed(0)
    return {
        "rewards": torch.rand(8, generator=generator),
        "rewards_per_func": torch.rand(8, 3, generator=generator),
        "group_ids": torch.tensor([0, 0, 1, 1, 1, 2, 2, 3]),  # the last group has no signal
        "mask": torch.arange(5) < torch.arange(1, 9)[:, None],
        "old_logps": torch.randn(8, 5, generator=generator),
        "ref_logps": torch.randn(8, 5, generator=generator),
    }


def test_settings_and_penalties_reach_the_estimator():
    inputs = rollout()
    rewards, ids, mask = (inputs[name] for name in ("rewards", "group_ids", "mask"))
    logps = inputs["old_logps"], inputs["ref_logps"]
    penalized = rewards - 0.2 * torch.where(mask, logps[0] - logps[1], 0).sum(1)
    for name, options, expected in (
        ("cpgd(weight='std')", {}, cpgd(rewards, ids, weight="std")),
        ("group_norm", {"scale": "none", "kl_coef": 0.2}, dr_grpo(penalized, ids)),
        ("reinforce", {"kl_coef": 0.2}, reinforce(rewards, mask, *logps, kl_coef=0.2)),
    ):
        assert_close(estimate_advantages(name, **inputs, **options), expected)


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.ones(8, 4), r"'doubtful' returned \(8, 4\).*\(8,\) or \(8, 5\)"),
        (torch.ones(7), r"'doubtful' returned \(7,\)"),
        ([0.0] * 8, "'doubtful' returned list"),
        (tensor([0, 0, 0, NAN, 0, 0, 0, 0]), "'doubtful' returned a value that isn't finite for sample 3"),
        (torch.full((8, 5), INF), "'doubtful' returned a value that isn't finite for sample 0"),
    ],
)
def test_function_of_the_user_is_checked(value, message):
    def doubtful(**tensors):
        return value

    with pytest.raises(ValueError, match=message):
        estimate_advantages(doubtful, **rollout())


@pytest.mark.parametrize("name", ["gae", "turn_norm", "unknown"])
def test_unknown_estimator_raises(name):
    with pytest.raises(ValueError, match=name):
        estimate_advantages(name, **rollout())


def test_estimators_are_listed_with_their_papers():
    assert all(own.name == name and own.paper is not None for name, own in ESTIMATORS.items())
    assert ALIASES == {own.alias: name for name, own in ESTIMATORS.items() if own.alias}
    assert not ALIASES.keys() & ESTIMATORS.keys()
    inputs = {**rollout(), "kl_coef": 0.1}
    for name, own in ESTIMATORS.items():
        if own.needs != "critic" and own.step_input is None:
            shape = inputs["mask"].shape if own.per_token else inputs["rewards"].shape
            assert estimate_advantages(own.alias or name, **inputs).shape == shape


# Rewards


@properties
@given(rewards=st.lists(st.lists(on_grid | st.just(NAN), max_size=6), max_size=6), resume=st.integers(0, 6))
def test_running_scale_does_not_depend_on_updates(rewards, resume):
    scale = RunningScale()
    for i, update in enumerate(rewards):
        if i == resume:
            state = scale.state_dict()
            scale = RunningScale()
            scale.load_state_dict(state)
        scale.update(tensor(update))
    scorable = [r for r in sum(rewards, []) if not math.isnan(r)]
    assert scale.count == len(scorable)
    if len(set(scorable)) > 1:
        assert scale.std == pytest.approx(statistics.stdev(scorable))
        assert scale.mean == pytest.approx(statistics.mean(scorable), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.1, 0.3, 0.7, 0.9, 1 / 3])
def test_running_scale_of_equal_rewards_is_1(constant, dtype):
    for n in range(1, 17):
        scale = RunningScale()
        assert scale.std == 1
        for _ in range(5):
            scale.update(torch.full((n,), constant, dtype=dtype))
            assert scale.std == 1


def test_autocast_leaves_the_precision():
    rewards = torch.randn(2, 100)
    values = torch.randn(2, 100)
    mask = torch.ones(2, 100)
    expected = gae(rewards, values, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        advantages, returns = gae(rewards, values, mask)
    assert_close(advantages, expected[0], rtol=0, atol=0)
    assert_close(returns, expected[1], rtol=0, atol=0)
