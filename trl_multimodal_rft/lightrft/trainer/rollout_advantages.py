# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages and returns from the rewards of a rollout, and their normalization over batches."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ...algorithms.advantages import gae
from ...algorithms.kl import FixedKLController
from ...algorithms.returns import cumulative_returns, terminal_rewards, whiten
from ...algorithms.shaping import RunningScale, shape_rewards
from ...rollout.ranks import gather_rows
from ...spelling import split_settings
from ..models.utils import compute_reward
from .experience import Experience, Tokens, info_of, zero_pad_sequences
from .experience_config import COMPARISONS, NORMALIZED, ExperienceConfig


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
            group_ids = torch.arange(n_samples, device=rewards.device) // args.n_samples_per_prompt
            compared = COMPARISONS[args.estimator.name](rewards, group_ids)
            rewards = torch.where(rewards.isnan(), torch.nan, compared)  # unscorable completions stay unscorable
        return experiences, list(rewards.split(sizes))

    def _shaped(self, rewards: list[torch.Tensor]) -> list[torch.Tensor]:
        args = self.strategy
        if args.reward_running_scale:
            all_rewards = torch.cat(rewards)
            local = args.accelerator is None
            self.reward_scale.update(all_rewards if local else gather_rows(args.accelerator, all_rewards))
        scale = self.reward_scale if args.reward_running_scale else None
        return [shape_rewards(part, scale, args.reward_clip_range) for part in rewards]

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
        )
        info["return"] = token_rewards.sum(1)
        if args.reward_running_scale or args.reward_clip_range is not None:
            info["shaped_reward"] = reward
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
    scales = not getattr(args, "no_advantage_std_norm", False)
    normalized = iter(whiten_rows(rows, masks, getattr(args, "accelerator", None), scales))
    for experience in experiences:
        batch = [next(normalized) for _ in experience.sequences]
        experience.advantages = batch if isinstance(experience.advantages, list) else torch.stack(batch)
    return experiences


def whiten_rows(
    rows: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], accelerator: Accelerator | None, scales: bool = True
) -> list[torch.Tensor]:
    """
    Returns rows of values, whitened over the masks of all rows, and of all ranks of an accelerator, see
    [`~algorithms.returns.whiten`].
    """

    def sum_over_ranks(sums: torch.Tensor) -> torch.Tensor:
        return sums if accelerator is None else accelerator.reduce(sums.to(accelerator.device)).to(sums.device)

    # A rank without rows takes part in the reduction, too
    values, mask = (torch.cat([*tensors] or [torch.zeros(0)]) for tensors in (rows, masks))
    whitened = whiten(values.double(), mask, reduce=sum_over_ranks, scales=scales).to(values.dtype)
    return [part.clone() for part in whitened.split([len(row) for row in rows])]


def _apply_padded(function: Callable, *inputs: Tokens, mask: Tokens | None) -> tuple[Tokens, ...]:
    """
    Applies a function to tensors `(B, A)` and their mask, by default all ones. Lists of rows are padded before the
    call, and the results lose this padding.
    """
    first = inputs[0]
    if isinstance(first, torch.Tensor):
        return function(*inputs, torch.ones_like(first) if mask is None else mask)
    lists = (*inputs, [torch.ones_like(row) for row in first] if mask is None else mask)
    results = function(*(zero_pad_sequences([*rows], "right") for rows in lists))
    return tuple([row[: len(original)] for row, original in zip(result, first, strict=True)] for result in results)
