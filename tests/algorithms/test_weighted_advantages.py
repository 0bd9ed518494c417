# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages with weights against slow loops over sets and tokens in float64, and against the papers' formulas."""

import math
import statistics
from itertools import combinations, product

import pytest
import torch
from algorithms.test_advantages import NAN, batches, on_grid, properties, seeds, slow_groups, tensor, unpack
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from trl_multimodal_rft import MultimodalGRPOConfig
from trl_multimodal_rft.algorithms.advantages import (
    estimate_advantages,
    max_rl,
    opo,
    optimal_token_baseline,
    pass_at_k,
    pkpo,
)


# By the rewards of a group, those of completions that can't be scored left out


def slow_max_rl(rewards, lengths):
    mean = statistics.mean(rewards)
    return [(reward - mean) / statistics.mean(map(abs, rewards)) for reward in rewards]


def slow_opo(rewards, lengths):
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / max(sum(lengths), 1)
    return [r - baseline for r in rewards]


def sets_of(rewards, k):
    return list(combinations(range(len(rewards)), min(k, len(rewards))))


def slow_pass_at_k(k, norm):
    def advantages(rewards, lengths):
        sets = sets_of(rewards, k)
        best = [max(rewards[i] for i in each) for each in sets]
        mean = statistics.mean(best)
        scale = statistics.pstdev(best) + 1e-6 if norm == "std" else 1
        of_set = dict(zip(sets, best, strict=True))
        return [(statistics.mean(of_set[s] for s in sets if i in s) - mean) / scale for i in range(len(rewards))]

    return advantages


def slow_pkpo(k):
    def advantages(rewards, lengths):
        sets = sets_of(rewards, k)
        gains = []
        for i in range(len(rewards)):
            own = [max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in sets if i in s]
            gains.append(len(sets[0]) * statistics.mean(own))
        return gains

    return advantages


CASES = {
    "max_rl": (lambda r, g, m: max_rl(r, g), slow_max_rl),
    "opo": (opo, slow_opo),
    **{
        f"pass_at_k {k} {norm}": (
            lambda r, g, m, k=k, norm=norm: pass_at_k(r, g, k=k, norm=norm),
            slow_pass_at_k(k, norm),
        )
        for k, norm in product((2, 3, 4), ("std", "none"))
    },
    **{f"pkpo {k}": (lambda r, g, m, k=k: pkpo(r, g, k=k), slow_pkpo(k)) for k in (2, 3, 8)},
}


@pytest.mark.parametrize("name", CASES)
@properties
@given(samples=batches)
def test_estimator_equals_a_loop_over_sets(name, samples):
    fast, formula = CASES[name]
    rewards, ids, lengths = zip(*samples, strict=True)
    groups = slow_groups(rewards, ids)
    expected = [0.0] * len(rewards)
    for own in set(ids):
        members = [i for i, each in enumerate(ids) if each == own and groups[i]]
        values = formula([rewards[i] for i in members], [lengths[i] for i in members]) if members else []
        for i, value in zip(members, values, strict=True):
            expected[i] = value
    result = fast(*unpack(samples))
    # A completion without tokens has no gradient, so that its advantage may be any
    counts = torch.tensor(lengths) > 0 if name == "opo" else torch.ones(len(rewards)).bool()
    assert_close(result[counts], tensor(expected)[counts], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n, k", [(8, 2), (8, 4), (8, 8), (5, 3)])
def test_pass_at_k_of_right_and_wrong_is_the_analytical_solution(n, k):
    for n_right in range(1, n):
        rewards = tensor([1] * n_right + [0] * (n - n_right))
        n_wrong = n - n_right
        rate = 1 - math.comb(n_wrong, k) / math.comb(n, k)
        std = math.sqrt(rate * (1 - rate)) + 1e-6
        wrong = 1 - rate - math.comb(n_wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        expected = tensor([(1 - rate) / std] * n_right + [wrong / std] * n_wrong)
        assert_close(pass_at_k(rewards, torch.zeros(n).long(), k=k), expected, rtol=1e-9, atol=1e-9)


def test_pkpo_is_an_unbiased_gradient_of_the_best_of_k():
    """The expectation over all groups of 4 draws from 3 answers is the derivative of the mean best of 2."""
    rewards = tensor([0, 1, 3])
    logits = tensor([0.2, -0.4, 0.1]).requires_grad_()
    k = 2
    probabilities = logits.softmax(0)
    best = sum(
        probabilities[i] * probabilities[j] * torch.max(rewards[i], rewards[j]) for i, j in product(range(3), repeat=k)
    )
    exact = torch.autograd.grad(best, logits, retain_graph=True)[0]
    mean = torch.zeros(3, dtype=torch.float64)
    for draw in product(range(3), repeat=4):
        draw = torch.tensor(draw)
        advantages = pkpo(rewards[draw], torch.zeros(4).long(), k=k)
        surrogate = (advantages * probabilities.log()[draw]).mean()
        gradient = torch.autograd.grad(surrogate, logits, retain_graph=True)[0]
        mean += probabilities.detach()[draw].prod() * gradient
    assert_close(mean, exact)


def test_max_rl_weighs_by_the_inverse_pass_rate():
    rewards = tensor([1, 0, 0, 0, 1, 1, 1, 0])
    advantages = max_rl(rewards, torch.tensor([0] * 4 + [1] * 4))
    assert_close(advantages, tensor([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1]))


# The optimal token baseline


def slow_otb(rewards, ids, logps, kls, kl_coef):
    """By completion a list of its tokens' advantages. `logps` and `kls` are lists of each completion's tokens."""

    def returns(i):
        tokens = [-kl_coef * kl for kl in kls[i]]
        tokens[-1:] = [each + rewards[i] for each in tokens[-1:]]
        return [sum(tokens[t:]) for t in range(len(tokens))]

    def energy(i, t):
        return sum(1 - math.exp(logp) for logp in logps[i][: t + 1])

    result = []
    for i, reward in enumerate(rewards):
        advantages = []
        for t in range(len(logps[i])):
            peers = [
                j for j in range(len(rewards)) if ids[j] == ids[i] and not math.isnan(rewards[j]) and len(logps[j]) > t
            ]
            if math.isnan(reward):
                advantages.append(0.0)
                continue
            total = sum(energy(j, t) for j in peers)
            baseline = sum(energy(j, t) * returns(j)[t] for j in peers) / total
            advantages.append(returns(i)[t] - baseline)
        result.append(advantages)
    return result


@properties
@given(
    rewards=st.lists(on_grid | st.just(NAN), min_size=1, max_size=6), seed=seeds, kl_coef=st.sampled_from([0.0, 0.3])
)
def test_token_baseline_equals_a_loop_wherever_tokens_stand(rewards, seed, kl_coef):
    generator = torch.Generator().manual_seed(seed)
    n = len(rewards)
    mask = torch.rand(n, 7, generator=generator) < 0.7
    ids = torch.randint(0, 2, (n,), generator=generator) * 2**40
    logps = -torch.rand(n, 7, generator=generator, dtype=torch.float64) - 0.1
    references = -torch.rand(n, 7, generator=generator, dtype=torch.float64)
    garbage = torch.where(mask, logps, NAN)
    result = optimal_token_baseline(
        tensor(rewards), ids, mask, garbage, torch.where(mask, references, NAN), kl_coef=kl_coef
    )
    tokens = [row[own].tolist() for row, own in zip(logps, mask, strict=True)]
    kls = [row[own].tolist() for row, own in zip(logps - references, mask, strict=True)]
    expected = slow_otb(rewards, ids.tolist(), tokens, kls, kl_coef)
    assert (result[~mask] == 0).all()
    assert_close(result[mask], tensor(sum(expected, [])), rtol=1e-8, atol=1e-8)


def test_token_baseline_of_equal_rewards_is_exactly_0():
    rewards = torch.full((6,), 0.1)
    mask = torch.arange(5) < torch.tensor([[1], [2], [3], [4], [5], [5]])
    assert (optimal_token_baseline(rewards, torch.zeros(6).long(), mask, -torch.rand(6, 5)) == 0).all()
    certain = torch.zeros(6, 5)  # tokens of probability 1 have no energy, and the baseline is the group's mean
    advantages = optimal_token_baseline(torch.arange(6.0), torch.zeros(6).long(), mask, certain)
    assert_close(advantages, torch.where(mask, torch.arange(6.0)[:, None] - 2.5, 0))


def test_energy_of_a_token_has_the_mean_of_the_papers():
    """The mean of 1 - pi over a distribution is that of 1 - 2 pi + sum pi^2."""
    distribution = tensor([0.5, 0.2, 0.2, 0.1])
    papers = 1 - 2 * distribution + distribution.square().sum()
    assert_close((distribution * papers).sum(), (distribution * (1 - distribution)).sum())


# Options


@pytest.mark.parametrize(
    "options, message",
    [
        ({"advantage_estimator": "pass_at_k(k=5)"}, r"compares sets of 5 completions.*`num_generations` \(4\)"),
        ({"advantage_estimator": "pkpo(k=1)"}, "`k` of 'pkpo' must be at least 2"),
        ({"advantage_estimator": "pkpo", "num_generations": 2}, "compares sets of 4 completions"),
        ({"advantage_estimator": "max_rl(k=2)"}, "'max_rl' has no setting 'k'"),
        ({"advantage_estimator": "opo", "num_generations": 1}, "compares the completions of a prompt"),
        ({"advantage_estimator": "optimal_token_baseline", "loss_type": "gmpo"}, "gives one per token"),
        (
            {"advantage_estimator": "optimal_token_baseline", "importance_sampling_level": "sequence"},
            "gives one per token",
        ),
        ({"advantage_estimator": "opo", "scale_rewards": "none"}, "applies to `advantage_estimator='group_norm'`"),
    ],
)
def test_options_of_other_methods_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MultimodalGRPOConfig("out", use_cpu=True, bf16=False, **{"num_generations": 4, **options})


def test_estimators_are_called_by_name():
    rewards = tensor([0, 1, 1, 3])
    ids = torch.zeros(4).long()
    tensors = {"rewards": rewards, "rewards_per_func": rewards[:, None], "group_ids": ids, "mask": torch.ones(4, 2)}
    assert_close(estimate_advantages("pkpo(k=2)", **tensors), pkpo(rewards, ids, k=2))
    logps = -torch.rand(4, 2, dtype=torch.float64)
    result = estimate_advantages("optimal_token_baseline", **tensors, old_logps=logps)
    assert_close(result, optimal_token_baseline(rewards, ids, tensors["mask"], logps))
