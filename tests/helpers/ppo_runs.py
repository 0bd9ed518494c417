# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of the PPO trainer that record values, and critics with values other than 0."""

import functools

import torch

from helpers.encoding import extended
from helpers.families import encode
from helpers.trainer_utils import Injected, Recording, RemembersPacking, image_rows, length_and_sum, moved
from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.models import Critic


FAMILY = "qwen2_5_vl"


class Sampled(Recording, RemembersPacking, MultimodalPPOTrainer):
    """Trainer that also records the critic's values of each micro-batch and the weights before each update."""

    def __init__(self, *args, **kwargs):
        self.values = []
        self.weights = []
        super().__init__(*args, **kwargs)

    def _loss(self, scores, inputs):
        if scores.values is not None:
            self.values.append(scores.values.detach())
        return super()._loss(scores, inputs)

    def training_step(self, *args, **kwargs):
        if self._step % self.args.gradient_accumulation_steps == 0:
            self.weights.append(weights_of(self.model))
        return super().training_step(*args, **kwargs)


class RemembersSupervised:
    """Mixin that records the completions of the supervised rows of each micro-batch, and their masks."""

    def __init__(self, *args, **kwargs):
        self.supervised = []
        super().__init__(*args, **kwargs)

    def _supervised_batch(self):
        batch = super()._supervised_batch()
        if batch is not None:
            self.supervised.append((batch.ids, batch.mask))
        return batch


class Ours(Injected, Sampled):
    pass


@functools.cache
def dataset():
    """Returns rows with images, and `hard` for every other row: tests reward all completions of a hard row equally."""
    return image_rows().add_column("hard", [i % 2 == 1 for i in range(8)])


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def rough(completion_ids, **kwargs):
    """Returns rewards, and `None` for some completions."""
    rewards = zip(completion_ids, length_and_sum(completion_ids), strict=True)
    return [None if sum(ids) % 4 == 0 else reward for ids, reward in rewards]


def head_weights():
    """Returns weight `(1, 64)` and bias `(1,)` of a critic's head."""
    generator = torch.Generator().manual_seed(3)
    return 0.2 * torch.randn(1, 64, generator=generator), torch.tensor([0.3])


def critic_of(family, distance=0.03):
    """Returns a critic whose weights differ from the policy's and whose values aren't 0."""
    critic = Critic(moved(family, distance)["model"])
    with torch.no_grad():
        for parameter, value in zip(critic.head.parameters(), head_weights(), strict=True):
            parameter.copy_(value)
    return critic


def encoded(processor, row, completion):
    """Returns inputs of a plain forward pass of a row's prompt and a completion, and the prompt's number of tokens."""
    blocks = [{"type": kind, kind: row[kind]} for kind in ("image", "audio", "video") if kind in row]
    if "audio" in row:
        blocks[0]["audio"] = row["audio"]["array"]
    blocks.append({"type": "text", "text": row["prompt"][0]["content"]})
    inputs = dict(encode(processor, [{"role": "user", "content": blocks}]))
    return extended(inputs, torch.tensor(completion).long()), inputs["input_ids"].size(1)
