# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of the GRPO trainer whose advantages and losses the tests recompute."""

import functools

import torch
from torch.testing import assert_close

from helpers.trainer_utils import Recorded, by_key, image_rows, keys, length_and_sum, run
from trl_multimodal_rft.algorithms.advantages import estimate_advantages


FAMILY = "qwen2_5_vl"
# An update has two micro-batches
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.03}


@functools.cache
def dataset():
    """Every fourth prompt is too hard: all its completions get the same reward."""
    return image_rows().add_column("hard", [i % 4 == 1 for i in range(8)])


def rough(completion_ids, hard, **kwargs):
    """Returns equal rewards for a hard prompt, and no reward for some other completions."""
    rewards = zip(completion_ids, length_and_sum(completion_ids), hard, strict=True)
    return [0.1 if h else None if sum(ids) % 6 == 0 else reward for ids, reward, h in rewards]


def ours(trainer_class=Recorded, family=FAMILY, rows=None, **options):
    return run(trainer_class, family, rows or dataset(), **{"self_check": False, **options})


def check_advantages(moments, drawn, estimator, *, beta=0.0, shape=lambda reward: reward, **options):
    """
    Compares the advantages in the loss with the estimator's, from the rewards of one draw of completions.

    Returns the rewards, `None` for completions without one.
    """
    batch, names = drawn.batch, keys(drawn.batch)
    total = drawn.rewards.nansum(1).tolist()
    unscorable = drawn.rewards.isnan().all(1).tolist()
    rewards = [None if missing else shape(reward) for reward, missing in zip(total, unscorable, strict=True)]
    prompts = list(dict.fromkeys(prompt for prompt, _ in names))
    scored = {"old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps"}
    expected = estimate_advantages(
        estimator,
        rewards=torch.tensor([torch.nan if reward is None else reward for reward in rewards]),
        rewards_per_func=drawn.rewards,
        group_ids=torch.tensor([prompts.index(prompt) for prompt, _ in names]),
        mask=batch["completion_mask"],
        **{name: batch[field] if beta else None for name, field in scored.items()},
        kl_coef=beta,
        **options,
    )
    assert expected.any()
    reached, masks = by_key(moments, "advantages"), batch["completion_mask"].bool()
    assert len(reached) == len(names)
    for name, values, mask in zip(names, expected, masks, strict=True):
        assert_close(reached[name], values.expand(len(mask))[mask], rtol=1e-4, atol=1e-5)
    return rewards


CANONICAL = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++_baseline": "reinforce_baseline"}


def loss_by_hand(trainer, moment, logps, weights=None):
    """Returns the loss of a micro-batch, computed token by token."""
    args, batch = trainer.args, moment.batch
    kind, steps = args.loss.name, args.gradient_accumulation_steps if moment.training else 1
    mask = batch["completion_mask"].bool()
    old = batch.get("old_per_token_logps", logps.detach())
    items = batch["num_items_in_batch"].item() * (steps / args.steps_per_generation if moment.training else 1)
    low, high = trainer.epsilon_low, trainer.epsilon_high
    total = torch.zeros(())
    for i in range(len(mask)):
        tokens = mask[i].nonzero().flatten().tolist()
        share = {
            **dict.fromkeys(("grpo", "sapo", "gmpo"), 1 / (max(len(tokens), 1) * len(mask) * steps)),
            **dict.fromkeys(("dapo", "cispo", "vespo", "cpgd", "dual_clip"), 1 / items),
            "luspo": 1 / (len(mask) * steps),
            "bnpo": 1 / (int(mask.sum()) * steps),
            "dr_grpo": 1 / (len(mask) * trainer.max_completion_length * steps),
        }[kind]
        weight = {t: 1.0 if weights is None else float(weights[i, t]) for t in tokens}
        mean = torch.zeros(())  # mean of clipped log-ratios, for GMPO
        for t in tokens:
            advantage = batch["advantages"][i] if batch["advantages"].dim() == 1 else batch["advantages"][i, t]
            ratio = (logps[i, t] - old[i, t]).exp()
            if kind == "cpgd":
                bounded = ratio.clamp(1 - low, 1 + high).log()
                policy = -torch.min(ratio.log() * advantage, bounded * advantage)
                drift = min(ratio.item() - 1, args.loss.settings.get("drift_clamp", 2.0))
                total += share * args.loss.settings.get("drift_coef", 0.01) * drift * logps[i, t]
            elif kind == "gmpo":
                bounded = ratio.log().clamp(max=high) if advantage > 0 else ratio.log().clamp(min=-low)
                mean = mean + weight[t] * bounded / max(sum(weight.values()), 1)
                policy = 0.0
            else:
                policy = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                if args.delta is not None and advantage < 0:
                    policy = torch.min(policy, -args.delta * advantage)
                assert kind in ("dapo", "dual_clip", "grpo", "bnpo", "dr_grpo") or advantage == 0
            total += share * weight[t] * policy
            if moment.kl_coef and not args.kl_in_reward:
                d = logps[i, t] - batch["ref_per_token_logps"][i, t]
                kl = d**2 / 2 if args.kl_estimator == "k2" else (-d).exp() - 1 + d
                if args.kl_estimator == "k3" and args.use_bias_correction_kl and kind != "gmpo":
                    kl = kl * ratio
                total += share * moment.kl_coef * kl
        if kind == "gmpo":
            total += -mean.exp() * batch["advantages"][i] / (len(mask) * steps)
    return total
