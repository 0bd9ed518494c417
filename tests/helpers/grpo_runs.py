# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of the GRPO trainer whose advantages and losses the tests recompute."""

import functools

import torch
from torch.testing import assert_close

from helpers.trainer_utils import Recorded, by_key, image_rows, keys, length_and_sum, run
from trl_multimodal_rft.algorithms.advantages import as_estimator, estimate_advantages
from trl_multimodal_rft.algorithms.losses import LossInputs, Normalizer, grpo_loss


FAMILY = "qwen2_5_vl"
# An update has two micro-batches
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.03}


@functools.cache
def dataset():
    """Returns rows with images. Every fourth row is hard: its completions get equal rewards from [`rough`]."""
    return image_rows().add_column("hard", [i % 4 == 1 for i in range(8)])


def rough(completion_ids, hard, **kwargs):
    """Returns equal rewards for a hard prompt, and no reward for some other completions."""
    rewards = zip(completion_ids, length_and_sum(completion_ids), hard, strict=True)
    return [0.1 if is_hard else None if sum(ids) % 6 == 0 else reward for ids, reward, is_hard in rewards]


def ours(trainer_class=Recorded, family=FAMILY, rows=None, **options):
    return run(trainer_class, family, rows or dataset(), **{"self_check": False, **options})


def check_advantages(moments, drawn, estimator, *, beta=0.0, shape=lambda reward: reward, **options):
    """
    Asserts that the loss got the estimator's advantages for the rewards of one draw of completions, which `shape` maps
    to shaped rewards. `moments` and `drawn` are records of [`Recording`]: the draw's micro-batches, and the draw.

    Returns the shaped rewards, with `None` for unscorable completions.
    """
    batch, names = drawn.batch, keys(drawn.batch)
    total = drawn.rewards.nansum(1).tolist()
    unscorable = drawn.rewards.isnan().all(1).tolist()
    rewards = [None if missing else shape(reward) for reward, missing in zip(total, unscorable, strict=True)]
    prompts = list(dict.fromkeys(prompt for prompt, _ in names))
    scored = {"old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps"} if beta else {}
    if as_estimator(estimator).reads_logps:
        scored["old_logps"] = "old_per_token_logps"
    expected = estimate_advantages(
        estimator,
        rewards=torch.tensor([torch.nan if reward is None else reward for reward in rewards]),
        rewards_per_func=drawn.rewards,
        group_ids=torch.tensor([prompts.index(prompt) for prompt, _ in names]),
        mask=batch["completion_mask"],
        **{name: batch[field] for name, field in scored.items()},
        kl_coef=beta,
        **options,
    )
    assert expected.any()
    reached, masks = by_key(moments, "advantages"), batch["completion_mask"].bool()
    assert len(reached) == len(names)
    for name, values, mask in zip(names, expected, masks, strict=True):
        assert_close(reached[name], values.expand(len(mask))[mask], rtol=1e-4, atol=1e-5)
    return rewards


# Estimators by their aliases
CANONICAL = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++_baseline": "reinforce_baseline"}


def loss_by_hand(trainer, moment, logps, weights=None):
    """Returns the loss of a micro-batch by its formula, which `test_trl_losses.py` and `test_losses.py` test."""
    args, batch = trainer.args, moment.batch
    accumulation = args.gradient_accumulation_steps if moment.training else 1
    # Number of the update's tokens: training has the number of a generation batch
    tokens = batch["num_items_in_batch"] * (accumulation / args.steps_per_generation if moment.training else 1)
    inputs = LossInputs(
        logps,
        batch.get("old_per_token_logps", logps.detach()),
        batch["advantages"],
        batch["completion_mask"],
        1.0 if weights is None else weights,
        ref_logps=batch["ref_per_token_logps"] if moment.kl_coef and not args.kl_in_reward else None,
        entropies=moment.entropies,
    )
    normalizer = Normalizer(accumulation, trainer.max_completion_length, tokens)
    return grpo_loss(args.loss, inputs, args.loss_options(), normalizer, kl_coef=moment.kl_coef or 0.0).loss
