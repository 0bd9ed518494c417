# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The account of the learning signal equals masks that are made by hand, in float64."""

from dataclasses import replace

import pytest
import torch

from trl_multimodal_rft.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossOptions,
    Normalizer,
    as_loss,
    grpo_loss,
    rloo_loss,
)
from trl_multimodal_rft.algorithms.metrics import KINDS
from trl_multimodal_rft.algorithms.signal import CAUSES, causes_by_reward, signal_metrics


OPTIONS = LossOptions(0.2, 0.3, delta=1.6, off_policy_threshold=0.05)
PLAIN = LossOptions(0.2, 0.3)
N = 120
T = 8


def drawn(seed: int = 0) -> LossInputs:
    """A micro-batch in which everything that takes a signal takes some."""
    torch.manual_seed(seed)
    logps = (-torch.rand(N, T, dtype=torch.float64) - 0.5).requires_grad_()
    lengths = torch.randint(1, T + 1, (N,))
    is_cut = torch.rand(N) < 0.2
    mask = ((torch.arange(T) < lengths[:, None]) & ~is_cut[:, None]).long()
    causes = torch.where(torch.rand(N) < 0.3, torch.randint(0, 4, (N,)), -1)
    advantages = torch.where(causes < 0, torch.randn(N, dtype=torch.float64), 0)
    return LossInputs(
        logps,
        logps.detach() + torch.randn(N, T, dtype=torch.float64) * 0.4,
        advantages,
        mask,
        weights=(torch.rand(N, T) < 0.7).double(),
        sampling_ratio=torch.where(torch.rand(N, T) < 0.2, 0, torch.rand(N, T, dtype=torch.float64) + 0.5),
        causes=causes,
        n_sampled=lengths,
        entropies=torch.ones(N, T, dtype=torch.float64),
    )


def shares(metrics: dict) -> dict[str, float]:
    return {
        name.removeprefix("signal/"): KINDS[metric.kind].value(metric.numbers.double()).item()
        for name, metric in metrics.items()
        if name.startswith("signal/")
    }


def by_hand(inputs: LossInputs, options: LossOptions) -> dict[str, float]:
    """The account of PPO's clipped loss, token by token."""
    ratio = (inputs.logps.detach() - inputs.old_logps).exp()
    divergence = ((inputs.old_logps - inputs.logps.detach()) * inputs.mask).sum(1) / inputs.mask.sum(1).clamp(min=1)
    counts = dict.fromkeys(("tokens", *CAUSES), 0)
    n_trained = 0
    for i in range(N):
        advantage = float(inputs.advantages[i])
        cause = int(inputs.causes[i])
        learns = False
        for t in range(int(inputs.n_sampled[i])):
            r = float(ratio[i, t])
            is_high = advantage > 0 and r > 1 + options.epsilon_high
            is_low = advantage < 0 and (r < 1 - options.epsilon_low or r > options.delta)
            if cause >= 0:
                name = CAUSES[cause]
            elif not inputs.mask[i, t]:
                name = "truncation"
            elif not inputs.weights[i, t]:
                name = "entropy_filter"
            elif advantage < 0 and divergence[i] > options.off_policy_threshold:
                name = "off_policy_mask"
            elif not inputs.sampling_ratio[i, t]:
                name = "engine_ratios"
            elif is_high or is_low:
                name = "trust_region"
            else:
                name = "tokens"
                learns = True
            counts[name] += 1
        n_trained += learns
    n_tokens = int(inputs.n_sampled.sum())
    return {"completions": n_trained / N, **{name: count / n_tokens for name, count in counts.items()}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dual_clip"])
def test_account_equals_masks_by_hand(loss, seed):
    inputs = drawn(seed)
    options = OPTIONS
    metrics = as_loss(loss)(inputs, options)
    account = shares(signal_metrics(metrics.loss, inputs, options))
    assert account == pytest.approx(by_hand(inputs, options), abs=1e-12)
    assert all(account[cause] > 0 for cause in CAUSES)


@pytest.mark.parametrize("loss", LOSSES)
def test_account_equals_the_gradient_of_the_loss(loss):
    """A token has a signal if and only if the loss of the step has a gradient at it; shares sum to 1."""
    inputs = replace(drawn(), causes=None, n_sampled=None)
    loss_type = as_loss(loss)
    if loss_type.per_completion:
        inputs = replace(inputs, sampling_ratio=inputs.sampling_ratio[:, :1])
    torch.manual_seed(1)
    output = grpo_loss(loss_type, inputs, OPTIONS, Normalizer(2, T, 100.0))
    account = shares(output.metrics)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logps)
    learns = (gradient != 0) & (inputs.advantages != 0)[:, None] & inputs.mask.bool()
    assert account["tokens"] == pytest.approx(learns.sum().item() / inputs.mask.sum().item(), abs=1e-12)
    assert account["completions"] == learns.any(1).sum().item() / N
    assert sum(account[name] for name in ("tokens", *CAUSES)) == pytest.approx(1)
    assert account["tokens"] > 0.02 and account["estimator"] > 0.02


def test_account_of_rloo():
    inputs = replace(drawn(), weights=1.0, sampling_ratio=None)
    old_logps = torch.where(inputs.mask.bool(), inputs.old_logps, 0).sum(1)
    account = shares(rloo_loss(replace(inputs, old_logps=old_logps), PLAIN).metrics)
    ratio = (torch.where(inputs.mask.bool(), inputs.logps.detach(), 0).sum(1) - old_logps).exp()
    is_clipped = (ratio > 1.3) & (inputs.advantages > 0) | (ratio < 0.8) & (inputs.advantages < 0)
    learns = (inputs.causes < 0) & ~is_clipped & (inputs.mask.sum(1) > 0)
    assert account["completions"] == learns.sum().item() / N
    n_tokens = inputs.n_sampled.sum().item()
    assert account["tokens"] == pytest.approx(inputs.mask[learns].sum().item() / n_tokens)
    n_clipped = inputs.mask[is_clipped & (inputs.causes < 0)].sum().item()
    assert account["trust_region"] == pytest.approx(n_clipped / n_tokens) and n_clipped


def test_an_evaluation_has_no_account():
    inputs = drawn()
    with torch.no_grad():
        assert signal_metrics(as_loss("grpo")(inputs, PLAIN).loss, inputs, PLAIN) == {}


def test_a_batch_that_is_not_forwarded_has_the_same_names():
    """Ranks gather the same metrics, also where no completion of one of them has a gradient."""
    inputs = drawn()
    without = replace(inputs, logps=inputs.logps.detach(), advantages=torch.zeros(N), causes=torch.full((N,), 1))
    account = shares(signal_metrics(as_loss("grpo")(without, PLAIN).loss, without, PLAIN))
    assert account.keys() == shares(signal_metrics(as_loss("grpo")(inputs, PLAIN).loss, inputs, PLAIN)).keys()
    assert account["equal_rewards"] == 1 and account["tokens"] == account["completions"] == 0


def test_causes_before_the_loss():
    rewards = torch.tensor([1.0, 1.0, 3.0, 4.0, 1.0, 2.0, torch.nan, 2.0])
    has_signal = torch.tensor([False, False, False, False, False, False, True, True])
    differs = torch.tensor([False, False, True, True, True, True, True, True])
    differs_clipped = torch.tensor([False, False, False, False, True, True, True, True])
    causes = causes_by_reward(rewards, has_signal, differs, differs_clipped)
    names = [CAUSES[cause] if cause >= 0 else None for cause in causes.tolist()]
    assert names == [*["equal_rewards"] * 2, *["clipped_rewards"] * 2, *["estimator"] * 2, "no_reward", None]


def test_a_loss_that_reads_no_log_probabilities_has_no_signal():
    inputs = drawn()
    loss = inputs.entropies.clone().requires_grad_() * 2
    assert shares(signal_metrics(loss, inputs, PLAIN))["tokens"] == 0
