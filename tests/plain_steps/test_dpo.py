# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An update of DPO, and that of the paper on one forward pass per answer."""

import copy

import pytest
from helpers.plain_steps import PAIRS, TOLERANCE, answering, answers_of, assert_same, difference
from helpers.trainer_utils import load, shifted

from trl_multimodal_rft import MultimodalDPOTrainer
from trl_multimodal_rft.plain.dpo import dpo_loss
from trl_multimodal_rft.plain.forward import descend, in_double


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize(("family", "rows"), PAIRS, ids=["images", "sounds"])
def test_update_is_that_of_the_plain_step(family, rows, beta):
    reference = shifted(load(family)[0])
    objects = {"ref_model": copy.deepcopy(reference)}
    run = answering(MultimodalDPOTrainer, family, rows(), objects=objects, beta=beta)
    pairs = list(zip(answers_of(run, rows(), "chosen"), answers_of(run, rows(), "rejected"), strict=True))
    reference = in_double(reference)
    loss = dpo_loss(run.start, reference, pairs, beta=beta)
    assert_same(run, [(loss.item(), descend(run.start, loss, 0.0))])
    for change in ({"beta": 1.1 * beta}, {"pairs": [pair[::-1] for pair in pairs], "beta": beta}):
        loss = dpo_loss(run.start, reference, **{"pairs": pairs, **change})
        assert difference(run.gradients[0], descend(run.start, loss, 0.0)) > 10 * TOLERANCE
