# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainers of TRL and of this package, with pseudo-random completions and a teacher that differs."""

import torch
from datasets import Dataset
from trl import DistillationTrainer

from helpers.samplers import pseudo_random
from helpers.trainer_utils import Injected, RemembersPacking, load, run
from trl_multimodal_rft import MultimodalDistillationTrainer


class InjectedTRL(DistillationTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return pseudo_random(prompt_ids, self.state.global_step, self.model.training, self._tokenizer)


class InjectedOurs(RemembersPacking, Injected, MultimodalDistillationTrainer):
    pass


def teacher(family: str, distance: float = 0.05):
    """Returns a model of a family with other weights."""
    model, _ = load(family)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator)
    return model


def distill(trainer_class, family: str, dataset, objects=None, **options):
    """Trains on the rows of a dataset in their order, with 4 completions of each."""
    if not issubclass(trainer_class, MultimodalDistillationTrainer):  # which knows one completion of a row
        dataset = Dataset.from_list([row for row in dataset for _ in range(4)])
    objects = {"teacher_model": teacher(family), **(objects or {})}
    options = {"learning_rate": 0.1, "shuffle_dataset": False, **options}
    return run(trainer_class, family, dataset, reward=None, objects=objects, **options)
