# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The entropy filter on real entropies: as many tokens as the option says, and those of the highest entropy."""

import math

import torch
from helpers.encoding import extended
from helpers.real_models import REAL, folder, load, question_rows
from helpers.trainer_utils import Recording, make_trainer

from trl_multimodal_rft import MultimodalGRPOTrainer


pytestmark = REAL
SHARE = 0.25


class Recorded(Recording, MultimodalGRPOTrainer):
    pass


@torch.no_grad()
def own_entropies(model, prompt, ids):
    """Entropies at the tokens of a completion by the model's own forward."""
    inputs = {"input_ids": prompt.input_ids[None], "attention_mask": torch.ones(1, len(prompt)).long()}
    logits = model(**extended(inputs, ids)).logits[0, -len(ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits.double()).entropy()


def test_tokens_of_highest_entropy_are_trained_on(tmp_path):
    trainer = make_trainer(
        Recorded,
        None,
        question_rows(2),
        tmp_path,
        objects={"model": folder("text")},
        top_entropy_quantile=SHARE,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=1e-5,
        max_completion_length=10,
    )
    trainer.train()
    model, _ = load("text")
    kept = []
    dropped = []
    for batch in (moment.batch for moment in trainer.micro_batches):
        for i, prompt in enumerate(batch.prompts):
            mask = batch.loss_mask[i].bool()
            entropies = own_entropies(model, prompt, batch.completion_ids[i][mask])
            weights = batch.tokens.weights[i][mask]
            kept.append(entropies[weights > 0])
            dropped.append(entropies[weights == 0])
    kept = torch.cat(kept)
    dropped = torch.cat(dropped)
    # Over both micro-batches of an update, of whose tokens a quarter had 4.7 nats on average, and the others 2.0
    assert len(kept) == math.ceil(SHARE * (len(kept) + len(dropped)))
    assert kept.min() > dropped.max() - 1e-4
    assert kept.mean() > 1.5 * dropped.mean() > 0.1
