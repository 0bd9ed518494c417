# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Losses, KL, entropy mask: hand-computed numbers, TRL's formulas, expectations over a small vocabulary."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.test_trl_losses import TRL_LOSSES
from torch.testing import assert_close

from trl_multimodal_rft.algorithms.critic import explained_variance, value_loss
from trl_multimodal_rft.algorithms.entropy import high_entropy_mask
from trl_multimodal_rft.algorithms.kl import AdaptiveKLController, FixedKLController, approx_kl
from trl_multimodal_rft.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossOptions,
    Normalizer,
    aggregate,
    as_loss,
    policy_drift,
)
from trl_multimodal_rft.rollout.engine_ratios import engine_ratios


NAN = math.nan
INF = math.inf
MODES = ["seq-mean-token-mean", "seq-mean-token-sum", "token-sum"]
properties = settings(max_examples=50, deadline=None, derandomize=True)


def tensor(values, **options):
    return torch.tensor(values, **{"dtype": torch.float64, **options})


def gradient(function, x):
    """Returns value and gradient of a scalar function."""
    x = x.detach().clone().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


# Policy losses. The third token of the second completion is padding

LOG_RATIO = tensor([[1.5, 0.5, 1.1], [4, 0.9, 1]]).log()
ADVANTAGES = tensor([1, -1])
MASK = tensor([[1, 1, 1], [1, 1, 0]])


def policy_loss(name, log_ratio, advantages, mask=None, epsilon_low=0.2, epsilon_high=0.2, *, weights=1.0, **options):
    """Calls a loss by name. The old log-probabilities are 0."""
    mask = torch.ones_like(log_ratio) if mask is None else mask
    name = "cpgd(drift_coef=0.0)" if name == "cpgd" else name
    options = LossOptions(epsilon_low, epsilon_high, **options)
    inputs = LossInputs(log_ratio, torch.zeros_like(log_ratio), advantages, mask, weights)
    return as_loss(name)(inputs, options).loss


def test_cpgd_golden():
    loss = policy_loss("cpgd", LOG_RATIO, ADVANTAGES)[MASK.bool()]
    assert_close(loss, tensor([-0.182322, 0.693147, -0.09531, 1.386294, -0.105361]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("advantages", [ADVANTAGES, tensor([[1, -2, 0.5], [-1, 3, 9]])], ids=["completion", "token"])
def test_cpgd_without_drift_is_lightrfts_loss(advantages, weighted):
    """`use_cpg_loss`: the clipped log-probability times the advantage, averaged in and then over completions."""
    loss = as_loss("cpgd(drift_coef=0.0, average='completions')")
    old = tensor([[-1, -2, -0.5], [-3, -0.1, -1]])
    kept = tensor([[1, 0, 1], [0, 1, 0]]) if weighted else MASK  # tokens of high entropy
    weights = kept * MASK.sum(1, keepdim=True) / kept.sum(1, keepdim=True) if weighted else 1.0
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]

    def own(logps):
        losses = loss(LossInputs(logps, old, advantages, MASK, weights), LossOptions(0.15, 0.3)).loss
        # Two micro-batches, which add up
        return sum(loss.average(losses[i : i + 1], MASK[i : i + 1], Normalizer(2, 99, 1e9)) for i in range(2))

    def lightrfts(logps):
        upper = math.log(1.3) + old
        lower = math.log(0.85) + old
        clipped = torch.where(per_token > 0, torch.minimum(logps, upper), torch.maximum(logps, lower))
        losses = torch.where(kept.bool(), -clipped * per_token, 0)
        return (losses.sum(1) / kept.sum(1)).mean()

    logps = old + LOG_RATIO
    (value, grad) = gradient(own, logps)
    (expected, expected_grad) = gradient(lightrfts, logps)
    assert expected_grad.any() and not expected_grad[~MASK.bool()].any()
    assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    # The values differ by what has no gradient
    assert_close(value - own(old).detach(), expected - lightrfts(old), rtol=1e-12, atol=1e-12)


def test_average_of_cpgd():
    for text, mode, denominator in (
        ("cpgd", "token-sum", "batch_tokens"),
        ("cpgd(average='tokens', drift_clamp=1.0)", "token-sum", "batch_tokens"),
        ("cpgd(average='completions')", "seq-mean-token-mean", "completions"),
    ):
        loss = as_loss(text)
        assert (loss.mode, loss.denominator, loss.is_mean) == (mode, denominator, mode != "token-sum")
        assert loss.spelling == text
    assert LOSSES["cpgd"].mode == "token-sum"
    with pytest.raises(ValueError, match="`average` of 'cpgd' must be one of 'tokens', 'completions'"):
        as_loss("cpgd(average='sequences')")
    with pytest.raises(ValueError, match="'grpo' has no setting 'average'"):
        as_loss("grpo(average='completions')")


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_exploding_ratio_leaves_finite_gradients(advantage):
    loss, grad = gradient(
        lambda x: policy_loss("dual_clip", x, tensor([advantage]), delta=3.0).sum(),
        tensor([[100, 1000, 0]], dtype=torch.float32),
    )
    assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cpgd_gradient_is_the_advantage_inside_the_clip_region(advantage):
    """Outside it the gradient is 0, but only in the direction of the advantage."""
    low = math.log(0.9)
    high = math.log(1.3)
    log_ratio = tensor([[low - 3, low - 0.01, low + 0.01, 0, high - 0.01, high + 0.01, high + 3]])
    moves = log_ratio < high if advantage > 0 else log_ratio > low
    grad = gradient(lambda x: policy_loss("cpgd", x, tensor([advantage]), None, 0.1, 0.3).sum(), log_ratio)[1]
    assert torch.equal(grad, torch.where(moves, tensor(-advantage), 0))


def test_policy_drift_gradient():
    """Equals the ratio minus 1, clamped above only."""
    old_logps = tensor([[-3, -2, -1, -4]])
    ratio = tensor([[0.1, 0.9, 1.5, 40]])
    grad = gradient(lambda x: policy_drift(x, old_logps, clamp=2.0).sum(), old_logps + ratio.log())[1]
    assert_close(grad, tensor([[-0.9, -0.1, 0.5, 2.0]]))


OWN = [name for name in LOSSES if name not in TRL_LOSSES]


@pytest.mark.parametrize("name", OWN)
def test_weights_and_ratios_of_the_sampler_leave_the_drift(name):
    """A masked token has no gradient except that of CPGD's drift and of the penalties of IPO and KL-Cov."""
    weights = tensor([[0, 1, 1], [2, 1, 1]])
    ratio = tensor([[3], [0]])

    def loss(mask=MASK, **options):
        inputs = LossInputs(LOG_RATIO, torch.zeros_like(LOG_RATIO), ADVANTAGES, mask, **options)
        return LOSSES[name](inputs, LossOptions(0.2, 0.2)).loss

    terms = {
        "cpgd": 0.01 * policy_drift(LOG_RATIO, torch.zeros_like(LOG_RATIO), 2.0),
        "ipo": 1e-3 * LOG_RATIO.square(),
        "kl_cov": tensor([[0, 0, 0], [0, -1, 0]]) * LOG_RATIO,  # of the token with the largest covariance
    }
    drift = terms.get(name, 0)
    if LOSSES[name].per_completion:
        assert_close(loss(sampling_ratio=ratio), loss() * ratio[:, 0])
        assert_close(loss(weights=weights), loss(MASK * weights))
    else:
        both = loss(weights=weights, sampling_ratio=ratio)
        assert_close(both - drift, (loss() - drift) * weights * ratio)


def test_engine_ratios_golden():
    logps = tensor([[1, 1.5, 9], [0.5, 0, 0], [-1, 0, 0], [0, 0, 0]]).log1p().nan_to_num(neginf=-3)
    sampled = tensor([[0.0, 0, 5], [0, math.nan, 0], [0, 0, 0], [math.nan, 0, 0]])
    mask = tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    ratios = tensor([5, 1.5, math.exp(-3), 1])
    assert_close(engine_ratios(logps, sampled, mask)[:, 0], ratios)
    assert_close(engine_ratios(logps, sampled, mask, largest=3.0)[:, 0], tensor([0, *ratios[1:].tolist()]))
    assert_close(engine_ratios(logps, sampled, mask, smallest=0.5)[:, 0], tensor([5, 1.5, 0, 1]))
    assert_close(engine_ratios(logps, sampled, mask, "sequence_truncate", 0.5, 3.0)[:, 0], tensor([3, 1.5, 0.5, 1]))


def test_losses_are_listed_with_their_papers():
    assert all(loss.name == name for name, loss in LOSSES.items())
    assert [name for name, loss in LOSSES.items() if loss.paper is None] == ["bnpo", "ipo"]


# Averages of losses


def random_losses(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(9, 6, generator=generator) < 0.6).double()
    mask[0] = 0
    return torch.randn(9, 6, generator=generator).double(), mask


@pytest.mark.parametrize("mode", MODES)
@properties
@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 9), max_size=4), data=st.data())
def test_aggregate_does_not_depend_on_micro_batches(mode, seed, cuts, data):
    values, mask = random_losses(seed)
    parts = torch.tensor(data.draw(st.permutations(range(9)))).tensor_split(sorted(cuts))
    denominator = 7.0 if mode == "token-sum" else 9

    def split(x):
        return sum(aggregate(x[part], mask[part], mode, denominator) for part in parts)

    rows = [[v for v, m in zip(*row, strict=True) if m] for row in zip(values.tolist(), mask.tolist(), strict=True)]
    lengths = [max(len(row), 1) if mode == "seq-mean-token-mean" else 1 for row in rows]
    value, grad = gradient(split, values)
    assert_close(value, tensor(sum(sum(row) / n for row, n in zip(rows, lengths, strict=True)) / denominator))
    assert_close(grad, mask / tensor(lengths)[:, None] / denominator)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_ignores_what_is_masked(mode):
    mask = tensor([[1, 0, 0], [0, 0, 0]])
    value, grad = gradient(lambda x: aggregate(x, mask, mode, 2), tensor([[3, NAN, INF], [-INF, NAN, 1e30]]))
    assert value == 1.5 and torch.equal(grad, mask / 2)


# KL divergence


@pytest.mark.parametrize(
    "estimator, expected", [("k1", [0.5, -1]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])]
)
def test_kl_golden_beside_padding(estimator, expected):
    logps = tensor([[-INF, -1, -3, NAN, -2]])
    ref_logps = tensor([[-INF, -1.5, -2, -1, INF]])
    mask = tensor([[0, 1, 1, 0, 0]])
    kl, grad = gradient(lambda x: approx_kl(x, ref_logps, mask, estimator).sum(), logps)
    result = approx_kl(logps, ref_logps, mask, estimator)
    assert_close(result, tensor([[0, *expected, 0, 0]]), rtol=0, atol=1e-6)
    assert kl.isfinite() and grad.isfinite().all() and (grad[mask == 0] == 0).all()


@pytest.mark.parametrize("d", [-200.0, 200.0])
def test_k3_is_finite(d):
    value, grad = gradient(
        lambda x: approx_kl(x, torch.zeros(1, 1), torch.ones(1, 1), "k3").sum(), tensor([[d]], dtype=torch.float32)
    )
    assert value.isfinite() and value > 100 and grad.isfinite().all()


# Controllers


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(0.1, target=0.5, horizon=100)
    for kl, n, expected in [
        (0.55, 50, 0.1 * 1.05),  # 10% above
        (0.5, 50, 0.105),  # on target
        (9.0, 50, 0.105 * 1.1),  # clipped at 20%
        (0.0, 50, 0.1155 * 0.9),
        (0.0, 1000, 0.10395 * 0.1),  # would have become negative
    ]:
        controller.update(kl, n)
        assert controller.value == pytest.approx(expected, rel=1e-12)
    fixed = FixedKLController(0.3)
    resumed = AdaptiveKLController(3.0, target=0.5, horizon=100)
    for one, other in ((controller, resumed), (fixed, FixedKLController(1.0))):
        other.load_state_dict(one.state_dict())
        for each in (one, other):
            each.update(100.0, 1000)
        assert other.value == one.value
    assert fixed.value == 0.3


@pytest.mark.parametrize("name", ["value", "target", "horizon"])
@pytest.mark.parametrize("number", [0, -0.1])
def test_adaptive_controller_needs_positive_numbers(name, number):
    with pytest.raises(ValueError, match=f"`{name}`.*{number}"):
        AdaptiveKLController(**{"value": 0.1, "target": 0.1, "horizon": 10, name: number})


# Entropy mask


def slow_highest(rows, ratio):
    """Uses one quota for all rows together."""
    tokens = [(-x, i, t) for i, row in enumerate(rows) for t, x in enumerate(row) if x is not None]
    kept = set(sorted(tokens)[: math.ceil(Fraction(str(ratio)) * len(tokens))])
    return [[x is not None and (-x, i, t) in kept for t, x in enumerate(row)] for i, row in enumerate(rows)]


# Few values, so that ties occur; negative values as from rounding; None is padding
entropy_rows = st.integers(1, 7).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([None, None, -0.05, 0.0, 0.5, 0.75, 2.0]), min_size=width, max_size=width),
        min_size=1,
        max_size=5,
    )
)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@properties
@given(rows=entropy_rows, ratio=st.sampled_from([0.05, 0.2, 0.3, 0.7, 1.0]), garbage=st.sampled_from([NAN, INF, 1e30]))
def test_entropy_mask_equals_sort(scope, rows, ratio, garbage):
    mask = torch.tensor([[x is not None for x in row] for row in rows])
    entropies = tensor([[garbage if x is None else x for x in row] for row in rows])
    expected = slow_highest(rows, ratio) if scope == "batch" else [slow_highest([row], ratio)[0] for row in rows]
    result = high_entropy_mask(entropies, mask, ratio, scope=scope)
    assert result.tolist() == expected
    weights = high_entropy_mask(entropies, mask, ratio, scope=scope, renormalize=True)
    assert_close(weights > 0, result > 0)
    dim = (0, 1) if scope == "batch" else 1
    assert_close(weights.sum(dim), mask.sum(dim).float())


@pytest.mark.parametrize(
    "ratio, n, kept",
    [(0.7, 10, 7), (0.2, 10, 2), (0.1, 30, 3), (0.55, 100, 55), (0.2, 11, 3), (1e-3, 10, 1), (1.0, 10, 10)],
)
@pytest.mark.parametrize("value", [0.0, -1e-3])
def test_entropy_mask_keeps_exactly_the_share(ratio, n, kept, value):
    """Covers all-equal entropies, of which the mask keeps the first, and never leading padding."""
    entropies = torch.full((1, n + 5), value)
    mask = torch.arange(n + 5)[None] >= 5
    entropies[:, :5] = 0
    expected = [0] * 5 + [1] * kept + [0] * (n - kept)
    assert high_entropy_mask(entropies, mask, ratio).tolist() == [expected]


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("ratio", [0.01, 0.07, 0.1, 0.29, 0.3, 0.5, 0.55, 0.99])
def test_rounding_down_keeps_as_many_tokens_as_lightrft(ratio, scope):
    """The whole part of the product in floating point, such as 28 of 100 for 0.29, but at least one token."""
    torch.manual_seed(0)
    for n in range(1, 102):
        entropies = torch.rand(1, 105)
        mask = torch.arange(105)[None] < n
        kept = high_entropy_mask(entropies, mask, ratio, scope=scope, rounding="down")
        n_kept = max(1, int(n * ratio))
        assert kept.sum() == n_kept and not kept[~mask].any()
        assert torch.equal(kept[0].nonzero()[:, 0], entropies[0, :n].topk(n_kept).indices.sort().values)
        weights = high_entropy_mask(entropies, mask, ratio, scope=scope, rounding="down", renormalize=True)
        assert_close(weights.sum(), torch.tensor(float(n)))
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert not high_entropy_mask(torch.rand(2, 3), nothing, ratio, scope=scope, rounding="down").any()
    # LightRFT's `topk` keeps any of equal entropies, here the first ones are kept
    equal = high_entropy_mask(torch.full((1, 9), 2.0), torch.ones(1, 9), 0.5, scope=scope, rounding="down")
    assert equal.tolist() == [[1] * 4 + [0] * 5]


def test_entropies_that_are_equal_up_to_rounding_are_ranked_by_position():
    """Those of first tokens, behind one prompt, of which layouts of a forward round another one up."""
    rounded = [torch.tensor([[5.4616890, 3.0], [5.4616895, 2.0]]), torch.tensor([[5.4616895, 3.0], [5.4616890, 2.0]])]
    for ratio, kept in ((0.25, [[1, 0], [0, 0]]), (0.5, [[1, 0], [1, 0]]), (0.75, [[1, 1], [1, 0]])):
        assert [high_entropy_mask(each, torch.ones(2, 2), ratio).tolist() for each in rounded] == [kept] * 2
    apart = torch.tensor([[5.4616, 3.0], [5.4618, 2.0]])
    assert high_entropy_mask(apart, torch.ones(2, 2), 0.25).tolist() == [[0, 0], [1, 0]]


# The critic


def test_clipped_values_get_no_gradient():
    """A value that moved too far towards its return gets no gradient. A value that moved away gets one."""
    values = torch.tensor([[1.0, -1.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    value_loss(values, 0 * ones, 2 * ones, ones, clip=0.2).loss.sum().backward()
    assert values.grad.tolist() == [[0.0, -3.0]]
    assert value_loss(values, 0 * ones, 2 * ones, ones).loss.tolist() == [[0.5, 4.5]]


def test_only_values_beyond_the_range_are_clipped():
    """Inside of it, the old value plus the change rounds to another float32 than the value."""
    generator = torch.Generator().manual_seed(0)
    old, values = 0.05 * torch.randn(2, 64, 64, generator=generator)
    returns = torch.randn(64, 64, generator=generator)
    mask = torch.ones(64, 64)

    def ratio(old_values, clip):
        total, count = value_loss(values, old_values, returns, mask, clip).metrics["value_clip_ratio"].numbers.tolist()
        return total / count

    assert (values - old).abs().max() < 0.5
    assert ratio(old, 0.5) == ratio(old, None) == 0
    assert 0.2 < ratio(old - 1, 0.5) < 0.8  # all values are beyond the range, and some moved towards their return


def test_explained_variance():
    returns = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 5, returns, mask) == 1  # a constant has no variance
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns, torch.ones(1, 4), mask).isnan()
    assert explained_variance(returns, returns, torch.zeros(1, 4)).isnan()
