# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""GRPO's updates, and those of the paper on one forward pass per completion."""

import copy

import pytest
from helpers.plain_steps import MEDIA, TOLERANCE, assert_same, difference, groups_of, trained
from helpers.trainer_utils import audio_rows, length_and_sum, load, shifted

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.plain.forward import descend, in_double, sampled
from trl_multimodal_rft.plain.grpo import grpo_loss


# Names of the trainer's options
NAMES = {"use_bias_correction_kl": "corrects_kl"}
# A second update, whose ratios differ from 1
TWICE = {"num_iterations": 2, "max_steps": 2}
CASES = {
    "defaults": {},
    "kl": {"beta": 0.1},
    "as in the paper": {"beta": 0.04, "loss_type": "grpo", "use_bias_correction_kl": False},
    "clipped": {"epsilon": 0.02, "temperature": 0.7},
}


def plain_updates(run, rows, reference, **options):
    """Returns loss and gradients of both updates."""
    options = {NAMES.get(name, name): value for name, value in options.items()}
    groups = groups_of(run, rows, length_and_sum)
    model = copy.deepcopy(run.start)
    sampled(model, [completion for group in groups for completion in group], options.get("temperature", 1.0))
    updates = []
    for _ in range(2):
        loss = grpo_loss(model, groups, reference, **options)
        updates.append((loss.item(), descend(model, loss, 0.05)))
    return updates


def compared(family, rows, **options):
    reference = shifted(load(family)[0]) if options.get("beta") else None
    objects = {"ref_model": copy.deepcopy(reference)} if options.get("beta") else {}
    run = trained(MultimodalGRPOTrainer, family, rows, objects, **TWICE, **options)
    return run, None if reference is None else in_double(reference)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("family", "rows"), [MEDIA[0], ("qwen2_audio", audio_rows)], ids=["images", "sounds"])
def test_updates_are_those_of_the_plain_step(family, rows, name):
    run, reference = compared(family, rows(), **CASES[name])
    assert_same(run, plain_updates(run, rows(), reference, **CASES[name]))


def test_other_options_give_other_updates():
    family, rows = MEDIA[0]
    options = CASES["as in the paper"]
    run, reference = compared(family, rows(), **options)
    for change in ({"epsilon": 0.02}, {"beta": 0.05}, {"use_bias_correction_kl": True}, {"loss_type": "dapo"}):
        (_, gradients) = plain_updates(run, rows(), reference, **{**options, **change})[1]
        assert difference(run.gradients[1], gradients) > 10 * TOLERANCE, change
