# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO's updates of policy and critic, and those of the paper on one forward pass per completion."""

import copy

import pytest
import torch
from helpers.plain_steps import MEDIA, TOLERANCE, assert_same, difference, groups_of, trained
from helpers.ppo_runs import critic_of, head_weights
from helpers.trainer_utils import length_and_sum, load, moved, norm, shifted

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.plain.forward import descend, in_double, sampled
from trl_multimodal_rft.plain.ppo import estimated, ppo_loss


RATE = 0.02
CASES = {
    "defaults": ({}, {}, {}),
    "all": (
        {
            "beta": 0.3,
            "advantage_estimator": "gae(gamma=0.9, lam=0.8)",
            "epsilon": 0.05,
            "vf_coef": 0.5,
            "cliprange_value": 0.1,
        },
        {"beta": 0.3, "gamma": 0.9, "lam": 0.8},
        {"epsilon": 0.05, "vf_coef": 0.5, "cliprange": 0.1},
    ),
}


def plain_updates(run, family, rows, of_estimates, of_loss):
    """Returns loss and gradients of both updates, by the trainer's names."""
    policy = copy.deepcopy(run.start)
    backbone = in_double(moved(family, 0.03)["model"])
    head = torch.nn.Linear(64, 1).double()
    with torch.no_grad():
        for parameter, value in zip(head.parameters(), head_weights(), strict=True):
            parameter.copy_(value)
    completions = [completion for group in groups_of(run, rows, length_and_sum) for completion in group]
    sampled(policy, completions)
    reference = in_double(shifted(load(family)[0], seed=5)) if "beta" in of_estimates else None
    batch = estimated(backbone, head, completions, reference, **of_estimates)
    updates = []
    for _ in range(2):
        loss = ppo_loss(policy, backbone, head, batch, **of_loss)
        critic = torch.nn.ModuleDict({"model": backbone, "head": head})
        gradients = descend(torch.nn.ModuleDict({"policy": policy, "critic": critic}), loss, RATE)
        updates.append((loss.item(), {name.removeprefix("policy."): value for name, value in gradients.items()}))
    return updates


def run_of(family, rows, options):
    objects = {"value_model": critic_of(family)}
    objects |= {"ref_model": shifted(load(family)[0], seed=5)} if "beta" in options else {}
    options = {"num_ppo_epochs": 2, "max_steps": 2, "learning_rate": RATE, "reward": length_and_sum, **options}
    return trained(MultimodalPPOTrainer, family, rows, objects, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("family", "rows"), MEDIA, ids=["images", "sounds"])
def test_updates_are_those_of_the_plain_step(family, rows, name):
    options, of_estimates, of_loss = CASES[name]
    run = run_of(family, rows(), options)
    updates = plain_updates(run, family, rows(), of_estimates, of_loss)
    assert_same(run, updates)
    for part in ("critic.", "model."):
        assert norm({name: value for name, value in updates[1][1].items() if name.startswith(part)}) > 0.01


def test_other_options_give_other_updates():
    family, rows = MEDIA[0]
    options, of_estimates, of_loss = CASES["all"]
    run = run_of(family, rows(), options)
    for change in ({"beta": 0.25}, {"gamma": 1.0}, {"lam": 0.95}):
        (_, gradients) = plain_updates(run, family, rows(), {**of_estimates, **change}, of_loss)[1]
        assert difference(run.gradients[1], gradients) > 10 * TOLERANCE, change
    for change in ({"epsilon": 0.2}, {"vf_coef": 0.4}, {"cliprange": 10.0}):
        (_, gradients) = plain_updates(run, family, rows(), of_estimates, {**of_loss, **change})[1]
        assert difference(run.gradients[1], gradients) > 10 * TOLERANCE, change
