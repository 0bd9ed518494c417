# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An update of supervised training, and that of the equations on one forward pass per answer."""

import pytest
import torch
from helpers.plain_steps import PAIRS, TOLERANCE, answering, answers_of, assert_same, difference

from trl_multimodal_rft import MultimodalSFTTrainer
from trl_multimodal_rft.plain.forward import descend
from trl_multimodal_rft.plain.sft import sft_loss


def answered(rows):
    """Returns rows with the chosen answer of each pair."""
    return rows.rename_column("chosen", "completion").remove_columns("rejected")


@pytest.mark.parametrize(("family", "rows"), PAIRS, ids=["images", "sounds"])
def test_update_is_that_of_the_plain_step(family, rows):
    run = answering(MultimodalSFTTrainer, family, answered(rows()))
    answers = answers_of(run, rows(), "chosen")
    loss = sft_loss(run.start, answers)
    assert_same(run, [(loss.item(), descend(run.start, loss, 0.0))])
    # A mean over answers of different lengths is another loss
    loss = torch.stack([sft_loss(run.start, [answer]) for answer in answers]).mean()
    assert difference(run.gradients[0], descend(run.start, loss, 0.0)) > 10 * TOLERANCE
