# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From the rewards of a rollout to advantages and returns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ...algorithms.advantages import estimate_advantages, gae
from ...algorithms.kl import FixedKLController
from ...algorithms.returns import cumulative_returns, token_rewards, whiten
from ...algorithms.shaping import RunningScale
from ...rollout.ranks import gather_rows
from .experience import Experience
from .experience_config import ExperienceConfig


class RolloutAdvantages:
    """Advantages and returns from the rewards of all ranks, the last stage of the experience maker."""

    def __init__(
        self, strategy: ExperienceConfig, kl_controller: FixedKLController | None = None, has_reference: bool = False
    ):
        self.strategy = strategy
        self.kl_ctl = kl_controller or FixedKLController(0.0)
        self.reward_scale = RunningScale()
        self._has_reference = has_reference

    @property
    def _kl_coef(self) -> float:
        """Coefficient of the KL divergence in the rewards."""
        return self.kl_ctl.value if self.strategy.kl_in_reward and self._has_reference else 0.0

    @torch.no_grad()
    def process_experiences(self, experiences: list[Experience]) -> tuple[list[Experience], list[torch.Tensor]]:
        """
        Shapes the rewards of a whole rollout: running scale, clip range, and the estimator's comparison within groups.

        Shapes: returns `(B,)`.
        """
        args, accelerator = self.strategy, self.strategy.accelerator
        sizes = [len(each.sequences) for each in experiences]
        in_groups = args.estimator.needs == "group"
        if in_groups and sum(sizes) % args.n_samples_per_prompt != 0:
            raise ValueError(
                f"There are {sum(sizes)} samples, which are no whole groups of {args.n_samples_per_prompt}; pass all "
                "experiences of a rollout."
            )
        if accelerator is not None:
            counts = accelerator.gather(torch.tensor([sum(sizes)], device=accelerator.device))
            if (counts != counts[0]).any():
                raise ValueError(f"Ranks have {counts.tolist()} samples; pass as many prompts on each.")
        rewards = self._gather(torch.cat([each.info["reward"] for each in experiences]).float())
        if args.reward_running_scale:
            self.reward_scale.update(rewards)
            rewards = rewards / self.reward_scale.std
        if args.reward_clip_range is not None:
            rewards = rewards.clamp(*args.reward_clip_range)
        for experience, part in zip(experiences, self._local(rewards).split(sizes), strict=True):
            if args.reward_running_scale or args.reward_clip_range is not None:
                experience.info["raw_reward"] = experience.info["reward"]
            experience.info["reward"] = part
        if in_groups:
            logps: dict[str, Any] = {}
            if self._kl_coef:
                logps["old_logps"] = self._gather(_joined(experiences, "action_log_probs"))
                logps["ref_logps"] = self._gather(_joined(experiences, "base_action_log_probs"))
            rewards = estimate_advantages(
                args.advantage_estimator,
                rewards=rewards,
                rewards_per_func=rewards[:, None],
                group_ids=torch.arange(len(rewards), device=rewards.device) // args.n_samples_per_prompt,
                mask=self._gather(_joined(experiences, "action_mask").int()),
                kl_coef=self._kl_coef,
                **logps,
            )
        return experiences, list(self._local(rewards).split(sizes))

    def _set_advantages(self, experiences, rewards, gamma: float, lambd: float) -> None:
        """Advantages and returns of all experiences from the results of [`process_experiences`]."""
        args, rewards = self.strategy, torch.cat(rewards)
        mask = _joined(experiences, "action_mask")
        if not args.estimator.per_token:
            advantages = returns = torch.where(mask, rewards[:, None], 0)
            sums = torch.cat([each.info["reward"] for each in experiences])
        else:
            names = ("action_log_probs", "base_action_log_probs") if self._kl_coef else ()
            logps = [_joined(experiences, name) for name in names]
            per_token = token_rewards(rewards, mask, *logps, kl_coef=self._kl_coef)
            scorable = mask & ~rewards.isnan()[:, None]
            if args.estimator.name == "gae":
                values, bootstrap = _joined(experiences, "values"), None
                if all("bootstrap" in each.info for each in experiences):
                    bootstrap = torch.cat([each.info["bootstrap"] for each in experiences])
                advantages, returns = gae(per_token, values, mask, gamma=gamma, lam=lambd, bootstrap=bootstrap)
                returns = torch.where(mask & ~scorable, values, returns)  # unscorable completions aren't trained on
            else:
                advantages = returns = cumulative_returns(per_token, mask, gamma)
            advantages = self._local(whiten(self._gather(advantages), self._gather(scorable.int())))
            sums = per_token.sum(1)
        start = 0
        for each in experiences:
            n, width = each.action_mask.shape
            rows = slice(start, start + n)
            each.advantages, each.returns = advantages[rows, :width], returns[rows, :width]
            each.info["return"] = sums[rows]
            start += n

    @torch.no_grad()
    def get_advantages_and_returns(
        self,
        values: torch.Tensor | list[torch.Tensor],
        rewards: torch.Tensor | list[torch.Tensor],
        action_mask: torch.Tensor | list[torch.Tensor] | None,
        gamma: float,
        lambd: float,
    ) -> tuple:
        """Generalized advantage estimation, see [`~algorithms.advantages.gae`]. Shapes: `values` `(B, A)`."""
        return _padded(lambda *columns: gae(*columns, gamma=gamma, lam=lambd), rewards, values, mask=action_mask)

    @torch.no_grad()
    def get_cumulative_returns(
        self,
        rewards: torch.Tensor | list[torch.Tensor],
        action_mask: torch.Tensor | list[torch.Tensor] | None,
        gamma: float,
    ) -> torch.Tensor | list[torch.Tensor]:
        """
        Discounted sums of the rewards from each action on, see [`~algorithms.returns.cumulative_returns`].

        Shapes: `rewards` `(B, A)`.
        """
        return _padded(lambda rewards, mask: (cumulative_returns(rewards, mask, gamma),), rewards, mask=action_mask)[0]

    # Ranks

    @property
    def _is_main(self) -> bool:
        accelerator = self.strategy.accelerator
        return accelerator is None or accelerator.is_main_process

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks, padded on the right."""
        accelerator = self.strategy.accelerator
        return values if accelerator is None else gather_rows(accelerator, values)

    def _local(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's rows of those of all ranks."""
        accelerator = self.strategy.accelerator
        return values if accelerator is None else values.chunk(accelerator.num_processes)[accelerator.process_index]


def penalize_length(experiences: list[Experience], penalty: Callable) -> None:
    """Adds a length penalty to rewards."""
    for experience in experiences:
        lengths = experience.info["response_length"].long().tolist()
        penalties = torch.tensor(penalty([range(n) for n in lengths]), device=experience.sequences.device)
        experience.info["soft_overlong_punishment"] = penalties
        experience.info["reward"] = experience.info["reward"] + penalties


def _joined(experiences: list[Experience], field: str) -> torch.Tensor:
    """A field of actions of all samples, padded on the right."""
    parts = [getattr(each, field) for each in experiences]
    width = max(part.size(1) for part in parts)
    return torch.cat([F.pad(part, (0, width - part.size(1))) for part in parts])


def _padded(function: Callable, *columns: torch.Tensor | list[torch.Tensor], mask) -> tuple:
    """Results of a function of columns and their mask, all ones by default; lists of rows are padded for it."""
    if not isinstance(columns[0], list):
        return function(*columns, torch.ones_like(columns[0]) if mask is None else mask)
    rows = (*columns, mask or [torch.ones_like(row) for row in columns[0]])
    results = function(*(pad_sequence(each, batch_first=True) for each in rows))
    return tuple([row[: len(given)] for row, given in zip(each, columns[0], strict=True)] for each in results)
