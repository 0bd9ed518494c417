# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantages and returns from the rewards of a rollout, and whitening of advantages over batches."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch.nn.utils.rnn import pad_sequence

from ...algorithms.advantages import estimate_advantages, gae
from ...algorithms.kl import FixedKLController
from ...algorithms.returns import cumulative_returns, token_rewards, whiten
from ...algorithms.shaping import RunningScale
from ...encoding.media import cat_padded
from ...rollout.ranks import gather_rows, local_rows
from .experience import Experience, Tokens, info_of
from .experience_config import ExperienceConfig


class RolloutAdvantages:
    """The last stage of the experience maker: computes advantages and returns from the rewards of all ranks."""

    def __init__(
        self, strategy: ExperienceConfig, kl_controller: FixedKLController | None = None, has_reference: bool = False
    ):
        self.strategy = strategy
        self.kl_ctl = kl_controller or FixedKLController(0.0)
        self.reward_scale = RunningScale()
        self._has_reference = has_reference

    @torch.no_grad()
    def process_experiences(self, experiences: list[Experience]) -> tuple[list[Experience], list[torch.Tensor]]:
        """
        Scales and clips the rewards of a whole rollout.

        Returns the experiences, and the shaped rewards of each experience, `(B,)`. These are the scaled and clipped
        rewards, or, if the estimator compares the completions of a group, its advantages. Raises a `ValueError` if
        samples don't form whole groups, or if ranks have different numbers of samples.
        """
        args, infos = self.strategy, [info_of(experience) for experience in experiences]
        sizes = [len(experience.sequences) for experience in experiences]
        in_groups = args.estimator.needs == "group"
        if in_groups and sum(sizes) % args.n_samples_per_prompt != 0:
            raise ValueError(
                f"There are {sum(sizes)} samples, which don't form whole groups of {args.n_samples_per_prompt}; pass "
                "all experiences of a rollout."
            )
        if (accelerator := args.accelerator) is not None:
            counts = accelerator.gather(torch.tensor([sum(sizes)], device=accelerator.device))
            if (counts != counts[0]).any():
                raise ValueError(
                    f"Ranks have {counts.tolist()} samples; pass the same number of prompts on each rank."
                )
        rewards = self._gather_rows(torch.cat([info["reward"] for info in infos]).float())
        if args.reward_running_scale:
            self.reward_scale.update(rewards)
            rewards = rewards / self.reward_scale.std
        if args.reward_clip_range is not None:
            rewards = rewards.clamp(*args.reward_clip_range)
        for info, part in zip(infos, self._local_rows(rewards, sum(sizes)).split(sizes), strict=True):
            if args.reward_running_scale or args.reward_clip_range is not None:
                info["raw_reward"] = info["reward"]
            info["reward"] = part
        shaped = rewards
        if in_groups:
            logps, kl_coef = self._kl_inputs(experiences)
            old_logps, ref_logps = map(self._gather_rows, logps) if logps else (None, None)
            shaped = estimate_advantages(
                args.advantage_estimator,
                rewards=rewards,
                rewards_per_func=rewards[:, None],  # as if a single function had returned them
                group_ids=torch.arange(len(rewards), device=rewards.device) // args.n_samples_per_prompt,
                mask=self._gather_rows(_join(experiences, "action_mask").int()),
                kl_coef=kl_coef,
                old_logps=old_logps,
                ref_logps=ref_logps,
            )
        return experiences, list(self._local_rows(shaped, sum(sizes)).split(sizes))

    def _set_advantages(
        self, experiences: list[Experience], shaped_rewards: list[torch.Tensor], gamma: float, lambd: float
    ) -> None:
        """Sets advantages and returns of all experiences from their shaped rewards, see [`process_experiences`]."""
        infos, mask = list(map(info_of, experiences)), _join(experiences, "action_mask")
        rewards = torch.cat(shaped_rewards)
        # For the `N` samples of all experiences, with at most `A` actions, `advantages` and `returns` have the shape
        # `(N, A)`. `sums`, `(N,)`, hold the returns of whole completions, for logs.
        if not self.strategy.estimator.per_token:
            advantages = returns = torch.where(mask, rewards[:, None], 0)
            sums = torch.cat([info["reward"] for info in infos])
        else:
            logps, kl_coef = self._kl_inputs(experiences)
            per_token = token_rewards(rewards, mask, *logps, kl_coef=kl_coef)
            scorable = mask & ~rewards.isnan()[:, None]
            if self.strategy.estimator.name == "gae":
                values, bootstrap = _join(experiences, "values"), None
                if all("bootstrap" in info for info in infos):
                    bootstrap = torch.cat([info["bootstrap"] for info in infos])
                advantages, returns = gae(per_token, values, mask, gamma=gamma, lam=lambd, bootstrap=bootstrap)
                returns = torch.where(mask & ~scorable, values, returns)  # unscorable completions aren't trained on
            else:
                advantages = returns = cumulative_returns(per_token, mask, gamma)
            advantages = whiten(self._gather_rows(advantages), self._gather_rows(scorable.int()))
            advantages, sums = self._local_rows(advantages, len(rewards)), per_token.sum(1)
        splits = (tensor.split([len(part) for part in shaped_rewards]) for tensor in (advantages, returns, sums))
        # `parts` are one experience's advantages, returns and sums. Columns from `num_actions` on are padding.
        for experience, info, *parts in zip(experiences, infos, *splits, strict=True):
            experience.advantages, experience.returns = (part[:, : info["num_actions"]] for part in parts[:2])
            info["return"] = parts[2]

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

    def _kl_inputs(self, experiences: list[Experience]) -> tuple[list[torch.Tensor], float]:
        """
        Returns log-probabilities under policy and reference, and the KL coefficient. If rewards have no KL penalty,
        returns an empty list and 0.
        """
        if not (self.strategy.kl_in_reward and self._has_reference and self.kl_ctl.value):
            return [], 0.0
        names = ("action_log_probs", "base_action_log_probs")
        return [_join(experiences, name) for name in names], self.kl_ctl.value

    # Ranks

    def _gather_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, padded on the right."""
        accelerator = self.strategy.accelerator
        return values if accelerator is None else gather_rows(accelerator, values)

    def _local_rows(self, values: torch.Tensor, n: int) -> torch.Tensor:
        """Returns this rank's `n` rows out of the rows of all ranks."""
        accelerator = self.strategy.accelerator
        return values if accelerator is None else local_rows(accelerator, values, n)


def normalize_advantages_cross_batch(
    experiences: list[Experience], advantage_estimator: str, args: Namespace
) -> list[Experience]:
    """
    Shifts and scales advantages to mean 0 and population variance 1 over the actions of all batches.

    This function is for experience from elsewhere, since the experience maker has whitened its advantages already.

    Args:
        experiences (`list[Experience]`):
            Batches, padded or packed, whose advantages are replaced in place.
        advantage_estimator (`str`):
            `"gae"`, `"reinforce"` or `"reinforce_baseline"`; advantages of other estimators stay unchanged.
        args (`argparse.Namespace`):
            If `no_advantage_std_norm` is true, advantages are shifted, but not scaled.

    Returns:
        `list[Experience]`: The batches, with advantages of 0 outside the mask.

    Raises:
        `ValueError`: If a batch has no advantages or no mask.
    """
    if advantage_estimator not in ("gae", "reinforce", "reinforce_baseline"):
        return experiences
    rows, masks = [], []
    for index, experience in enumerate(experiences):
        if experience.advantages is None or experience.action_mask is None:
            raise ValueError(f"`advantages` or `action_mask` of batch {index} is None; compute both before the call.")
        rows += [*experience.advantages]
        masks += [*experience.action_mask]
    values, mask = torch.cat(rows), torch.cat(masks).bool()
    if getattr(args, "no_advantage_std_norm", False):
        values = torch.where(mask, values - values[mask].mean(), 0)
    else:
        values = whiten(values, mask)
    normalized = iter(values.split([len(row) for row in rows]))
    for experience in experiences:
        batch = [next(normalized) for _ in experience.sequences]
        experience.advantages = batch if isinstance(experience.advantages, list) else torch.stack(batch)
    return experiences


def _join(experiences: list[Experience], field: str) -> torch.Tensor:
    """Joins a field of actions `(B, A)` of all experiences, padded on the right."""
    return cat_padded([getattr(experience, field) for experience in experiences], 0)


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
