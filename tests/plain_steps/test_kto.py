# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An update of KTO, and that of the paper on one forward pass per answer."""

import copy

import pytest
from helpers.plain_steps import PAIRS, TOLERANCE, answering, answers_of, assert_same, difference
from helpers.trainer_utils import load, shifted

from trl_multimodal_rft import MultimodalKTOTrainer
from trl_multimodal_rft.plain.forward import descend, in_double
from trl_multimodal_rft.plain.kto import divergence, kto_loss


SEEDS = {"qwen2_5_vl": 11, "qwen2_audio": 3}  # of references whose estimate of the divergence is positive
LABELS = [i in (0, 1, 4, 6) for i in range(8)]
OPTIONS = {"beta": 0.2, "desirable_weight": 1.7, "undesirable_weight": 0.4}


def labelled(rows):
    """Returns rows with the chosen answer of each pair, and labels."""
    return rows.rename_column("chosen", "completion").remove_columns("rejected").add_column("label", LABELS)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "weighted"])
@pytest.mark.parametrize(("family", "rows"), PAIRS, ids=["images", "sounds"])
def test_update_is_that_of_the_plain_step(family, rows, options):
    reference = shifted(load(family)[0], seed=SEEDS[family])
    objects = {"ref_model": copy.deepcopy(reference)}
    run = answering(MultimodalKTOTrainer, family, labelled(rows()), objects=objects, **options)
    answers = answers_of(run, rows(), "chosen")
    reference = in_double(reference)
    assert divergence(run.start, reference, answers) > 0.1
    loss = kto_loss(run.start, reference, answers, LABELS, **options)
    assert_same(run, [(loss.item(), descend(run.start, loss, 0.0))])
    # Pairs of other rows, other labels, and another beta
    turned = answers[4:] + answers[:4]
    for other, change in ((answers, {"beta": 0.3}), (turned, {}), (answers[::-1], {})):
        loss = kto_loss(run.start, reference, other, LABELS, **{**options, **change})
        assert difference(run.gradients[0], descend(run.start, loss, 0.0)) > 10 * TOLERANCE
