# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An update of distillation, and that of the paper on one forward pass per completion."""

import pytest
from helpers.distillation_runs import teacher
from helpers.plain_steps import MEDIA, TOLERANCE, assert_same, difference, groups_of, trained

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.plain.distillation import distillation_loss
from trl_multimodal_rft.plain.forward import descend, in_double


@pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"beta": 0.3, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize(("family", "rows"), MEDIA, ids=["images", "sounds"])
def test_update_is_that_of_the_plain_step(family, rows, options):
    objects = {"teacher_model": teacher(family)}
    run = trained(MultimodalDistillationTrainer, family, rows(), objects, reward=None, max_steps=1, **options)
    groups = groups_of(run, rows())
    completions = [completion for group in groups for completion in group]
    of_teacher = in_double(teacher(family))
    loss = distillation_loss(run.start, of_teacher, completions, **options)
    assert_same(run, [(loss.item(), descend(run.start, loss, 0.0))])
    for change in ({"beta": 0.4}, {"temperature": 0.8}):
        loss = distillation_loss(run.start, of_teacher, completions, **{**options, **change})
        assert difference(run.gradients[0], descend(run.start, loss, 0.0)) > 10 * TOLERANCE
