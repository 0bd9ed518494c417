# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""RLOO's updates, and those of the paper on one forward pass per completion."""

import copy

import pytest
from helpers.plain_steps import MEDIA, assert_same, difference, groups_of, trained
from helpers.trainer_utils import length_and_sum, load, moved

from trl_multimodal_rft import MultimodalRLOOTrainer
from trl_multimodal_rft.plain.forward import descend, in_double, sampled
from trl_multimodal_rft.plain.rloo import leave_one_out_advantages, rloo_loss


CASES = {"no kl": (0.0, 0.2, 1.0), "kl": (0.05, 10.0, 1.0), "clipped": (0.05, 0.4, 0.7)}
RATE = 2e-4  # a completion's ratio moves fast, and few would be within the range
SUMS = 2e-5  # the tolerance, of ratios that are exponentials of sums


def run_of(family, rows, beta, epsilon, temperature):
    """Two updates on the same completions; ratios of the second differ from 1."""
    options = {"beta": beta, "epsilon": epsilon, "temperature": temperature, "num_iterations": 2, "max_steps": 2}
    model = moved(family)["model"]
    return trained(MultimodalRLOOTrainer, family, rows, model=model, learning_rate=RATE, **options)


def plain_updates(run, family, rows, beta, epsilon, temperature):
    """Returns loss and gradients of both updates."""
    groups = groups_of(run, rows, length_and_sum)
    model = copy.deepcopy(run.start)
    sampled(model, [completion for group in groups for completion in group], temperature)
    reference = in_double(load(family)[0]) if beta else None
    advantages = leave_one_out_advantages(groups, reference, beta=beta, temperature=temperature)
    updates = []
    for _ in range(2):
        loss = rloo_loss(model, groups, advantages, epsilon=epsilon, temperature=temperature)
        updates.append((loss.item(), descend(model, loss, RATE)))
    return updates


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("family", "rows"), MEDIA, ids=["images", "sounds"])
def test_updates_are_those_of_the_plain_step(family, rows, name):
    run = run_of(family, rows(), *CASES[name])
    assert_same(run, plain_updates(run, family, rows(), *CASES[name]), SUMS)


def test_other_options_give_other_updates():
    family, rows = MEDIA[0]
    run = run_of(family, rows(), *CASES["clipped"])
    for options in ((0.04, 0.4, 0.7), (0.05, 10.0, 0.7), (0.05, 0.4, 1.0)):
        (_, gradients) = plain_updates(run, family, rows(), *options)[1]
        assert difference(run.gradients[1], gradients) > 10 * SUMS, options
