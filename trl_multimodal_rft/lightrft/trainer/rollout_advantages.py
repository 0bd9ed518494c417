# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages and returns from the rewards of a rollout, and their normalization over batches."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ...algorithms.advantages import gae, group_statistics, rloo
from ...algorithms.kl import FixedKLController
from ...algorithms.returns import cumulative_returns, terminal_rewards, whiten
from ...algorithms.shaping import RunningScale
from ...rollout.ranks import gather_rows
from ...spelling import split_settings
from ..models.utils import compute_reward
from .experience import Experience, Tokens, info_of
from .experience_config import NORMALIZED, ExperienceConfig


# Added to the standard deviation of a group's rewards, as in LightRFT. TRL and this package's own trainers add 1e-4.
_EPS = 1e-8


class RolloutAdvantages:
    """The last stage of the experience maker: computes advantages and returns from the rewards of a rollout."""

    def __init__(self, strategy: ExperienceConfig, kl_controller: FixedKLController | None = None):
        self.strategy = strategy
        self.kl_ctl = kl_controller or FixedKLController(0.0)
        self.reward_scale = RunningScale()

    @torch.no_grad()
    def process_experiences(self, experiences: list[Experience]) -> tuple[list[Experience], list[torch.Tensor]]:
        """
        Shapes the rewards of a whole rollout, whose completions stand group by group.

        `"rloo"` subtracts the mean of the group's other rewards, `"group_norm"` the mean, and divides by the sample
        standard deviation plus 1e-8, and `"reinforce_baseline"` and `"dr_grpo"` subtract the mean. Other estimators
        keep the rewards. Rewards of a group that differ only by rounding become 0.

        Returns:
            `tuple`: The experiences, and the shaped rewards of each, shape `(B,)`.

        Raises:
            `ValueError`: If samples don't form whole groups, or if ranks have different numbers of samples.
        """
        args = self.strategy
        sizes = [len(experience.sequences) for experience in experiences]
        n_samples = sum(sizes)
        if args.compares_groups and n_samples % args.n_samples_per_prompt != 0:
            raise ValueError(
                f"There are {n_samples} samples, which don't form whole groups of {args.n_samples_per_prompt}; pass "
                "all experiences of a rollout."
            )
        if args.accelerator is not None:
            counts = args.accelerator.gather(torch.tensor([n_samples], device=args.accelerator.device))
            if (counts != counts[0]).any():
                raise ValueError(
                    f"Ranks have {counts.tolist()} samples; pass the same number of prompts on each rank."
                )
        rewards = torch.cat([info_of(experience)["reward"] for experience in experiences])
        if args.compares_groups:
            rewards = _compare(rewards, args.estimator.name, args.n_samples_per_prompt)
        return experiences, list(rewards.split(sizes))

    def _scaled(self, rewards: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.strategy.reward_running_scale:
            return rewards
        accelerator = self.strategy.accelerator
        all_rewards = torch.cat(rewards)
        self.reward_scale.update(all_rewards if accelerator is None else gather_rows(accelerator, all_rewards))
        return [part / self.reward_scale.std for part in rewards]

    def _set_advantages(self, experience: Experience, reward: torch.Tensor, gamma: float, lambd: float) -> None:
        """Sets advantages, returns and `info["return"]` from shaped rewards `(B,)`, and drops what is used up."""
        args = self.strategy
        info = info_of(experience)
        mask: Any = experience.action_mask
        kl: Any = experience.kl
        values: Any = experience.values
        scorable = mask.bool() & ~reward.isnan()[:, None]
        token_rewards: Any = compute_reward(
            reward.nan_to_num(),
            self.kl_ctl.value if args.kl_in_reward else 0.0,
            kl,
            action_mask=mask,
            reward_clip_range=args.reward_clip_range,
        )
        info["return"] = token_rewards.sum(1)
        if args.reward_running_scale or args.reward_clip_range is not None:
            clipped = reward if args.reward_clip_range is None else reward.clamp(*args.reward_clip_range)
            info["shaped_reward"] = clipped
        if args.estimator.name == "gae":
            if "bootstrap" in info:  # the value after a truncated completion stands in for the rewards that follow
                token_rewards = token_rewards + gamma * terminal_rewards(info["bootstrap"], mask)
            estimates: Any = self.get_advantages_and_returns(values, token_rewards, mask, gamma, lambd)
            experience.advantages = torch.where(scorable, estimates[0], 0)
            # The critic isn't trained on unscorable completions
            experience.returns = torch.where(mask.bool() & ~scorable, values, estimates[1])
        else:
            returns: Any = self.get_cumulative_returns(token_rewards, mask, gamma)
            experience.advantages = torch.where(scorable, returns, 0)
            experience.returns = returns
        experience.kl = None
        del info["num_actions"]

    @torch.no_grad()
    def get_advantages_and_returns(
        self, values: Tokens, rewards: Tokens, action_mask: Tokens | None, gamma: float, lambd: float
    ) -> tuple[Tokens, ...]:
        """Computes advantages and returns `(B, A)`, or lists of rows, see [`~algorithms.advantages.gae`]."""
        return _apply_padded(lambda *inputs: gae(*inputs, gamma=gamma, lam=lambd), rewards, values, mask=action_mask)

    @torch.no_grad()
    def get_cumulative_returns(self, rewards: Tokens, action_mask: Tokens | None, gamma: float) -> Tokens:
        """
        Computes discounted sums of the rewards from each action on, see [`~algorithms.returns.cumulative_returns`].

        Rewards and returns have the shape `(B, A)`, or are lists of rows.
        """
        return _apply_padded(
            lambda rewards, mask: (cumulative_returns(rewards, mask, gamma),), rewards, mask=action_mask
        )[0]


def normalize_advantages_cross_batch(
    experiences: list[Experience], advantage_estimator: str, args: ExperienceConfig | Namespace
) -> list[Experience]:
    """
    Shifts and scales advantages to mean 0 and population variance 1 over the actions of all batches.

    Args:
        experiences (`list[Experience]`):
            Batches, padded or packed, whose advantages are replaced in place. Samples whose `reward` in `info` is
            `NaN` don't count, and get advantages of 0.
        advantage_estimator (`str`):
            `"gae"`, `"reinforce"` or `"reinforce_baseline"`; advantages of other estimators stay unchanged.
        args ([`ExperienceConfig`] or `argparse.Namespace`):
            Options. If `no_advantage_std_norm` is true, advantages are shifted, but not scaled. With an `accelerator`,
            mean and variance cover the batches of all its ranks.

    Returns:
        `list[Experience]`: The batches, with advantages of 0 outside the mask.

    Raises:
        `ValueError`: If a batch has no advantages or no mask.
    """
    if split_settings(advantage_estimator)[0] not in NORMALIZED:
        return experiences
    rows: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for index, experience in enumerate(experiences):
        if experience.advantages is None or experience.action_mask is None:
            raise ValueError(f"`advantages` or `action_mask` of batch {index} is None; compute both before the call.")
        rewards = info_of(experience).get("reward")
        for sample, (row, mask) in enumerate(zip(experience.advantages, experience.action_mask, strict=True)):
            is_scorable = rewards is None or not bool(rewards[sample].isnan())
            rows.append(row)
            masks.append(mask.bool() if is_scorable else torch.zeros_like(mask, dtype=torch.bool))
    accelerator = getattr(args, "accelerator", None)

    def sum_over_ranks(sums: torch.Tensor) -> torch.Tensor:
        return sums if accelerator is None else accelerator.reduce(sums.to(accelerator.device)).to(sums.device)

    values = torch.cat(rows)
    mask = torch.cat(masks)
    if getattr(args, "no_advantage_std_norm", False):
        total, count = sum_over_ranks(torch.stack([values[mask].sum(dtype=torch.float64), mask.sum().double()]))
        values = torch.where(mask, values - (total / count.clamp(min=1)).to(values.dtype), 0)
    else:
        values = whiten(values, mask, reduce=sum_over_ranks)
    normalized = iter(values.split([len(row) for row in rows]))
    for experience in experiences:
        batch = [next(normalized) for _ in experience.sequences]
        experience.advantages = batch if isinstance(experience.advantages, list) else torch.stack(batch)
    return experiences


def _compare(rewards: torch.Tensor, estimator: str, n: int) -> torch.Tensor:
    """Returns rewards relative to those of their group of `n`, see [`RolloutAdvantages.process_experiences`]."""
    group_ids = torch.arange(len(rewards), device=rewards.device) // n
    groups = group_statistics(rewards, group_ids)
    shaped = groups.centred.to(rewards)
    if estimator == "rloo":
        shaped = rloo(rewards, group_ids)
    elif estimator == "group_norm":
        shaped = (groups.centred / (groups.std(correction=1) + _EPS)[groups.index]).to(rewards)
    return torch.where(rewards.isnan(), torch.nan, shaped)  # unscorable completions stay unscorable


def _apply_padded(function: Callable, *inputs: Tokens, mask: Tokens | None) -> tuple[Tokens, ...]:
    """
    Applies a function to tensors `(B, A)` and their mask, by default all ones. Lists of rows are padded before the
    call, and the results lose this padding.
    """
    first = inputs[0]
    if isinstance(first, torch.Tensor):
        return function(*inputs, torch.ones_like(first) if mask is None else mask)
    lists = (*inputs, [torch.ones_like(row) for row in first] if mask is None else mask)
    results = function(*(pad_sequence(list(rows), batch_first=True) for rows in lists))
    return tuple([row[: len(original)] for row, original in zip(result, first, strict=True)] for result in results)
