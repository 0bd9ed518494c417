# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""While the colocated engine samples, the trainer's model takes no memory either, and updates stay the same."""

import pytest
import torch
from helpers.engine_runs import make
from helpers.trainer_utils import image_rows

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.trainers.sampling.offload import storages


pytestmark = pytest.mark.slow


class Counting(MultimodalGRPOTrainer):
    """Counts bytes of memory of the trainer's while the engine runs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.live = []
        self.run = self.vllm_generation._run_requests
        self.vllm_generation._run_requests = self.counting
        for model in (self.model, self.ref_model):  # which are mapped from files, as no weights on a GPU are
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

    def counting(self, *args):
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        everything = [*self.model.parameters(), *self.ref_model.parameters(), *states]
        self.live.append(sum(storage.nbytes() for storage in storages(everything).values()))
        return self.run(*args)


def test_engine_samples_without_the_model(tmp_path):
    updates = []
    lives = []
    seeds = {"seed": 7}  # each request's own, as the process's first engine leaves torch's generator in another state
    options = {"beta": 0.1, "optim": "adamw_torch", "seed": 7, "generation_kwargs": seeds}
    for offload in (False, True):
        options["offload_during_generation"] = offload
        trainer = make(Counting, "qwen2_5_vl", image_rows(), tmp_path / str(offload), **options)
        trainer.train()
        updates.append({name: parameter.detach() for name, parameter in trainer.model.named_parameters()})
        lives.append(trainer.live)
        del trainer
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in updates[0])
    trained = sum(parameter.nbytes for parameter in updates[0].values())
    counters = 4 * len(updates[0])
    assert lives == [[2 * trained, 4 * trained + counters, 4 * trained + counters], [0] * 3]
