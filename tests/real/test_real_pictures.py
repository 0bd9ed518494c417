# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Ten updates of a pretrained model that sees, by SFT and DPO, are TRL's: losses, gradients and weights.

TRL leaves the frozen tower's batch norms in training mode, where they normalize by the pictures of a batch. Its runs
here use the running statistics, as those of this package do.
"""

import tempfile

import pytest
import trl
from datasets import Dataset
from helpers.real_models import REAL, folder
from helpers.trainer_utils import Run, logged, make_trainer, norm, relative_difference
from sight_tasks import pictured_shapes
from transformers import AutoProcessor

import trl_multimodal_rft as package
from trl_multimodal_rft.models.modes import fix_batch_norms


pytestmark = REAL
UPDATES = 10
TRAINED = "multi_modal_projector"
FROZEN = ["vision_tower", "language_model", "lm_head"]
OPTIONS = {
    "max_steps": UPDATES,
    "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "max_length": None,
    "model_init_kwargs": {"dtype": "float32"},
}
# By the names of the trainers: a rate at which ten updates change the loss, and rows of an update
CASES = {
    "SFT": {"learning_rate": 1e-4, "per_device_train_batch_size": 2},
    "DPO": {"learning_rate": 1e-4, "per_device_train_batch_size": 1},
}


def reply(text):
    return [{"role": "assistant", "content": text}]


def rows(name):
    """Questions about pictures, with their answers, for DPO with wrong ones, too."""
    drawn = pictured_shapes(train_rows=2 * UPDATES, test_rows=4)["train"]
    answers = drawn["solution"]
    columns = {"prompt": drawn["prompt"], "images": [[image] for image in drawn["image"]]}
    if name == "SFT":
        return Dataset.from_dict({**columns, "completion": [reply(answer) for answer in answers]})
    wrong = ["no" if answer == "yes" else "yes" for answer in answers]
    pairs = {"chosen": [reply(answer) for answer in answers], "rejected": [reply(answer) for answer in wrong]}
    return Dataset.from_dict({**columns, **pairs})


def trained(name, library, **more):
    trainer_class = getattr(library, f"{'' if library is trl else 'Multimodal'}{name}Trainer")
    objects = {"model": folder("image"), "processing_class": AutoProcessor.from_pretrained(folder("image"))}
    options = {**OPTIONS, **CASES[name], **more}
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(trainer_class, None, rows(name), output_dir, objects=objects, reward=None, **options)
        if library is trl:
            for weight, parameter in trainer.model.named_parameters():
                parameter.requires_grad_(TRAINED in weight)
            fix_batch_norms(trainer.model.model.vision_tower.modules())
        before = {weight: p.detach().clone() for weight, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
    after = dict(trainer.model.named_parameters())
    update = {weight: after[weight].detach() - value for weight, value in before.items()}
    return Run(trainer, update, trainer.state.log_history)


@pytest.mark.parametrize("name", CASES)
def test_ten_updates_are_those_of_trl(name):
    theirs = trained(name, trl)
    ours = trained(name, package, self_check=False, freeze=FROZEN)
    # Rounding grows from update to update: gradients of a new projector are large
    for metric, tolerance in (("loss", 1e-3), ("grad_norm", 1e-2)):
        values = [logged(run, metric) for run in (theirs, ours)]
        assert len(values[0]) == UPDATES and max(values[0]) > 0.1
        assert values[1] == pytest.approx(values[0], rel=tolerance, abs=1e-4), metric
    assert norm(theirs.update) > 0.01 and relative_difference(theirs.update, ours.update) < 1e-2
