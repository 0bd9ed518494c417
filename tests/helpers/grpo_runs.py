# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of the GRPO trainer whose advantages and losses the tests recompute."""

import functools
import math
from statistics import fmean, pstdev

import torch
from torch.testing import assert_close

from helpers.trainer_utils import Recorded, by_key, image_rows, keys, length_and_sum, run


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


def centred(rewards, prompts, lengths):
    """Returns rewards minus their mean over the completions of a prompt that have one, 0 without a reward."""
    groups = {prompt: [] for prompt in prompts}
    for reward, prompt in zip(rewards, prompts, strict=True):
        groups[prompt] += [] if reward is None else [reward]
    pairs = zip(rewards, prompts, strict=True)
    return [0.0 if reward is None else reward - fmean(groups[prompt]) for reward, prompt in pairs]


def whitened(rewards, prompts, lengths):
    """Returns rewards minus their mean over all tokens, divided by their deviation, 0 without a reward."""
    by_token = []
    for reward, length in zip(rewards, lengths, strict=True):
        by_token += [] if reward is None else [reward] * length
    return [0.0 if reward is None else (reward - fmean(by_token)) / pstdev(by_token) for reward in rewards]


def check_advantages(moments, drawn, formula, *, shape=lambda reward: reward):
    """
    Asserts that the loss got the advantages of a formula for the rewards of one draw of completions, which `shape`
    maps to shaped rewards. `moments` and `drawn` are records of [`Recording`]: the draw's micro-batches, and the draw.

    Returns the shaped rewards, with `None` for unscorable completions.
    """
    names = keys(drawn.batch)
    total = drawn.rewards.nansum(1).tolist()
    unscorable = drawn.rewards.isnan().all(1).tolist()
    rewards = [None if missing else shape(reward) for reward, missing in zip(total, unscorable, strict=True)]
    masks = drawn.batch["completion_mask"].bool()
    expected = torch.tensor(formula(rewards, [prompt for prompt, _ in names], masks.sum(1).tolist()))
    assert expected.any()
    reached = by_key(moments, "advantages")
    assert len(reached) == len(names)
    for name, value, mask in zip(names, expected, masks, strict=True):
        assert_close(reached[name], value.expand(len(mask))[mask], rtol=1e-4, atol=1e-5)
    return rewards


# Estimators by their aliases
CANONICAL = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++_baseline": "reinforce_baseline"}


def shares(trainer, moment):
    """Returns the weight of each token of a micro-batch in the mean of the loss type, `(B, C)`."""
    args = trainer.args
    mask = moment.batch["completion_mask"]
    steps = args.gradient_accumulation_steps if moment.training else 1
    # Number of the update's tokens: training has the number of a generation batch
    n_tokens = moment.batch["num_items_in_batch"] * (steps / args.steps_per_generation if moment.training else 1)
    n = len(mask) * steps
    denominators = {
        **dict.fromkeys(("grpo", "gmpo"), n * mask.sum(1, keepdim=True)),
        **dict.fromkeys(("dapo", "cpgd", "dual_clip"), n_tokens),
        "luspo": n,
        "bnpo": steps * mask.sum(),
        "dr_grpo": n * args.max_completion_length,
    }
    return mask / denominators[args.loss.name]


def loss_by_hand(trainer, moment, logps, weights=1.0):
    """Returns the loss of a micro-batch by the formulas of the papers."""
    args = trainer.args
    batch = moment.batch
    mask = batch["completion_mask"]
    name = args.loss.name
    advantages = batch["advantages"]
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    log_ratios = torch.where(mask.bool(), logps - batch.get("old_per_token_logps", logps.detach()), 0)
    ratios = log_ratios.exp()
    epsilon = args.epsilon
    terms = 0.0
    if name == "gmpo":
        clipped = torch.where(advantages > 0, log_ratios.clamp(max=epsilon), log_ratios.clamp(min=-epsilon))
        chosen = mask * weights
        losses = (
            -((clipped * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp(min=1)).exp() * advantages
        )
        weights = 1.0
    elif name == "cpgd":
        clipped = log_ratios.clamp(math.log(1 - epsilon), math.log(1 + epsilon))
        losses = -torch.minimum(log_ratios * advantages, clipped * advantages)
        drift = {"drift_coef": 0.01, "drift_clamp": 2.0, **args.loss.settings}
        terms = drift["drift_coef"] * (ratios.detach() - 1).clamp(max=drift["drift_clamp"]) * logps
    else:
        largest = args.delta if name == "dual_clip" else math.inf
        clipped = ratios.clamp(1 - epsilon, 1 + epsilon)
        losses = -torch.minimum(ratios.clamp(max=largest) * advantages, clipped * advantages)
    if moment.kl_coef and not args.kl_in_reward:
        assert args.kl_estimator == "k2"
        terms = terms + moment.kl_coef * (logps - batch["ref_per_token_logps"]).square() / 2
    return torch.where(mask.bool(), (losses * weights + terms) * shares(trainer, moment), 0).sum()
