# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An update of a reward model, and that of the paper on one forward pass per answer."""

import pytest
import torch
from helpers.plain_steps import PAIRS, TOLERANCE, answering, answers_of, assert_same, difference
from helpers.trainer_utils import load

from trl_multimodal_rft import MultimodalRewardTrainer
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.plain.forward import descend
from trl_multimodal_rft.plain.reward import reward_loss


MARGINS = [0.5, 0.0, 1.5, 0.2, 0.0, 0.7, 0.1, 2.0]


def reward_model(family):
    """Returns a reward model whose score is as large as its other weights."""
    model, _ = load(family)
    torch.manual_seed(1)
    model = as_reward_model(model)
    with torch.no_grad():
        model.score.weight.mul_(6)
    return model


@pytest.mark.parametrize("margins", [None, MARGINS], ids=["no margin", "margins"])
@pytest.mark.parametrize(("family", "rows"), PAIRS, ids=["images", "sounds"])
def test_update_is_that_of_the_plain_step(family, rows, margins):
    dataset = rows() if margins is None else rows().add_column("margin", margins)
    run = answering(MultimodalRewardTrainer, family, dataset, model=reward_model(family))
    pairs = list(zip(answers_of(run, rows(), "chosen"), answers_of(run, rows(), "rejected"), strict=True))
    loss = reward_loss(run.start, pairs, margins)
    assert_same(run, [(loss.item(), descend(run.start, loss, 0.0))])
    loss = reward_loss(run.start, pairs, [1.0] * 8)
    assert difference(run.gradients[0], descend(run.start, loss, 0.0)) > 10 * TOLERANCE
