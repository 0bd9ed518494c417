# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""IPO, DPPO, Clip-Cov, KL-Cov and FIPO against loops over tokens in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from trl_multimodal_rft import MultimodalGRPOConfig
from trl_multimodal_rft.algorithms.losses import LossInputs, LossOptions, as_loss


OPTIONS = LossOptions(0.15, 0.25)


def clip(x, low, high):
    return min(max(x, low), high)


# References: loss and gradient by the log-probability of a token, from the tokens of its completion up to the end.
# `ratio` is the ratio of policy to old policy, `p` and `q` are probabilities under the policy and the sampler.


def slow_ipo(row, t, advantage, threshold=0.05, tau=0.5):
    ratio, p, q = row[t]
    log_ratio = math.log(p / q)
    kept = abs(p - q) <= threshold
    return -ratio * advantage * kept + tau * log_ratio**2, -ratio * advantage * kept + 2 * tau * log_ratio


def slow_dppo(row, t, advantage, divergence, largest=1.2):
    ratio, p, q = row[t]
    left = divergence(p, q) > (0.25 if p > q else 0.15) and (p > q) == (advantage > 0)
    weight = 0 if left else -min(ratio, largest) * advantage
    return weight * math.log(p), weight


def binary_kl(p, q):
    return 4 * (q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))


def slow_ppo(ratio, advantage, delta=math.inf):
    plain = min(ratio, delta) * advantage
    bound = clip(ratio, 0.85, 1.25) * advantage
    moves = plain <= bound and ratio <= delta
    return -min(plain, bound), -ratio * advantage * moves


def slow_fipo(row, t, advantage, smallest=0.5, delta=2.0):
    future = sum(0.5 ** (s / 3) * math.log(each[0]) * (each[0] <= delta) for s, each in enumerate(row[t:]))
    weight = clip(math.exp(future), smallest, 1.5)
    if advantage < 0 and row[t][0] > 1.3:
        weight = clip(weight, 0.8, 1.0)
    value, slope = slow_ppo(row[t][0], advantage, delta)
    return weight * value, weight * slope


CASES = {
    "ipo(ipo_threshold=0.05, kl_tau=0.5)": slow_ipo,
    "dppo_tv(clip_ratio_c=1.2)": lambda row, t, a: slow_dppo(row, t, a, lambda p, q: abs(p - q)),
    "dppo_kl(clip_ratio_c=1.2)": lambda row, t, a: slow_dppo(row, t, a, lambda p, q: binary_kl(p, q) / 4),
    "fipo(decay_rate=3, clip_range=0.5, clip_high_only=False, safety_threshold=1.3)": slow_fipo,
    "fipo(decay_rate=3, clip_range=0.5, safety_threshold=1.3)": lambda row, t, a: slow_fipo(row, t, a, 1.0),
}


def inputs_of(seed, engine=False, spread=1.5):
    """Returns inputs whose mask has gaps, and whose engine left out some log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 9, generator=generator) < 0.8
    old = (torch.rand(6, 9, generator=generator, dtype=torch.float64) * 0.9 + 0.05).log()
    new = (old + spread * torch.randn(6, 9, generator=generator, dtype=torch.float64)).clamp(-5, -0.02)
    advantages = torch.tensor([1.5, -0.5, -2.0, 0.3, 1.0, -1.0], dtype=torch.float64)
    sampling = old + 0.3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    sampling = torch.where(torch.rand(6, 9, generator=generator) < 0.2, torch.nan, sampling.clamp(max=-0.01))
    return LossInputs(new.requires_grad_(), old, advantages, mask, sampling_logps=sampling if engine else None)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_a_loop(name, engine):
    for seed in range(10):
        inputs = inputs_of(seed, engine, spread=0.5)
        options = replace(OPTIONS, delta=2.0) if name.startswith("fipo") else OPTIONS
        losses = as_loss(name)(inputs, options).loss
        gradient = torch.autograd.grad(losses[inputs.mask].sum(), inputs.logps)[0]
        sampler = inputs.old_logps
        if engine:
            sampler = torch.where(inputs.sampling_logps.isnan(), sampler, inputs.sampling_logps)
        parts = (inputs.logps - inputs.old_logps).exp(), inputs.logps.exp(), sampler.exp()
        assert (gradient[~inputs.mask] == 0).all()
        for i in range(len(losses)):
            own = inputs.mask[i]
            row = [*zip(*(part[i][own].tolist() for part in parts), strict=True)]
            expected = [CASES[name](row, t, inputs.advantages[i].item()) for t in range(len(row))]
            got = torch.stack([losses[i][own], gradient[i][own]], 1)
            assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def slow_covariances(inputs):
    """Covariances by the indices of tokens."""
    tokens = inputs.mask.nonzero().tolist()
    advantages = [inputs.advantages[i].item() for i, _ in tokens]
    logps = [inputs.logps[i, t].item() for i, t in tokens]
    means = sum(advantages) / len(tokens), sum(logps) / len(tokens)
    products = [(a - means[0]) * (b - means[1]) for a, b in zip(advantages, logps, strict=True)]
    return dict(zip(map(tuple, tokens), products, strict=True))


def is_clipped(ratio, advantage):
    return ratio > 1.25 if advantage > 0 else ratio < 0.85


@pytest.mark.parametrize("share", [2e-4, 0.2, 1.0])
def test_clip_cov_leaves_out_random_tokens_of_the_range(share):
    seen = set()
    for seed in range(10):
        inputs = inputs_of(seed % 2, spread=0.3)
        torch.manual_seed(seed)
        losses = as_loss(f"clip_cov(clip_cov_ratio={share}, clip_cov_lb=0.2, clip_cov_ub=2.0)")(inputs, OPTIONS).loss
        plain = as_loss("dapo")(inputs, OPTIONS).loss
        ratios = (inputs.logps - inputs.old_logps).exp()
        left_out = {(i, t) for i, t in inputs.mask.nonzero().tolist() if losses[i, t] == 0}
        candidates = {
            (i, t)
            for (i, t), value in slow_covariances(inputs).items()
            if 0.2 < value < 2.0 and not is_clipped(ratios[i, t].item(), inputs.advantages[i].item())
        }
        assert left_out <= candidates and len(candidates) > 3
        assert len(left_out) == min(max(int(share * inputs.mask.sum()), 1), len(candidates))
        kept = inputs.mask & (losses != 0)
        assert torch.equal(losses[kept], plain[kept])
        seen.add(frozenset(left_out))
    assert (len(seen) > 2) == (share < 1)


def test_clip_cov_draws_nothing_in_an_evaluation():
    inputs = inputs_of(0, spread=0.3)
    before = torch.get_rng_state()
    losses = as_loss("clip_cov(clip_cov_lb=0.2)")(replace(inputs, logps=inputs.logps.detach()), OPTIONS).loss
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(losses, as_loss("dapo")(inputs, OPTIONS).loss.detach())


@pytest.mark.parametrize("share", [2e-4, 0.2, 1.0])
def test_kl_cov_penalizes_the_largest_covariances(share):
    for seed in range(5):
        inputs = inputs_of(seed)
        losses = as_loss(f"kl_cov(kl_cov_ratio={share}, ppo_kl_coef=0.7)")(inputs, OPTIONS).loss
        gradient = torch.autograd.grad(losses[inputs.mask].sum(), inputs.logps)[0]
        values = slow_covariances(inputs)
        n = max(int(share * len(values)), 1)
        largest = sorted(values, key=values.get)[-n:]
        for i, t in values:
            log_ratio = (inputs.logps[i, t] - inputs.old_logps[i, t]).item()
            plain = -math.exp(log_ratio) * inputs.advantages[i].item()
            penalized = (i, t) in largest
            assert losses[i, t].item() == pytest.approx(plain + 0.7 * penalized * abs(log_ratio))
            slope = 0.7 * penalized * math.copysign(1, log_ratio)
            assert gradient[i, t].item() == pytest.approx(plain + slope)


@pytest.mark.parametrize("name", ["ipo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "fipo"])
def test_extreme_tokens_have_finite_gradients(name):
    logps = torch.tensor([[-60.0, -1e-9, 0.0, -1e-3], [0.0, -60.0, -1e-9, 0.0]], requires_grad=True)
    old = torch.tensor([[0.0, -40.0, 0.0, -60.0], [-1e-9, 0.0, -3.0, -60.0]])
    inputs = LossInputs(logps, old.clamp(min=-40), torch.tensor([1.0, -1.0]), torch.ones(2, 4))
    losses = as_loss(name)(inputs, LossOptions(0.2, 0.2)).loss
    assert losses.isfinite().all()
    losses.sum().backward()
    assert logps.grad.isfinite().all()


# Options


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "ipo(kl_tau=-1.0)"}, "`kl_tau` of 'ipo' must be at least 0"),
        ({"loss_type": "ipo(epsilon=0.1)"}, "'ipo' has no setting 'epsilon'"),
        ({"loss_type": "dppo_tv(clip_ratio_c=0.0)"}, "`clip_ratio_c` of 'dppo_tv' must be above 0"),
        ({"loss_type": "kl_cov(kl_cov_ratio=2.0)"}, "`kl_cov_ratio` of 'kl_cov' must be above 0 and at most 1"),
        ({"loss_type": "fipo(clip_high_only=5)"}, "`clip_high_only` of 'fipo' must be `True` or `False`"),
        ({"loss_type": "dppo_kl", "delta": 3.0}, "`delta` has no effect with `loss_type='dppo_kl'`"),
        ({"loss_type": "ipo", "importance_sampling_level": "sequence"}, "clips the ratios of tokens"),
    ],
)
def test_options_of_other_methods_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MultimodalGRPOConfig("out", use_cpu=True, bf16=False, **options)
