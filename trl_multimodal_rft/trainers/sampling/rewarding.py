# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stage of a rollout that rewards completions, and leaves out those whose environment failed."""

from dataclasses import dataclass, replace

import torch
from accelerate.logging import get_logger

from ...algorithms.metrics import event_count, nan_mean
from ...algorithms.shaping import contrast_bonus
from ...rollout.estimates import rewards_by_turn, rewards_per_func, turn_metrics, warn_of_unscorable
from ...rollout.ranks import any_rank, sum_over_ranks
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Prompted, Rewards, Rollout
from .context import Context
from .prompting import Prompting
from .rollout_views import in_same_groups


logger = get_logger(__name__)


@dataclass
class Rewarding:
    """Stage that calls reward functions. All ranks must call it."""

    context: Context
    prompting: Prompting
    functions: RewardFunctions

    def with_sounds(self, rollout: Rollout) -> Rollout:
        """Returns a rollout with the sounds of its completions, and logs them, if the completions are speech."""
        decoder = self.functions.speech_decoder
        if decoder is None:
            return rollout
        rollout = decoder(rollout)
        self.context.metrics.add(decoder.metrics(rollout))
        return rollout

    def __call__(self, rollout: Rollout) -> Rewards:
        """Returns, and logs, the rewards of the completions of all ranks."""
        accelerator = self.context.accelerator
        rewards = self._call(rollout)
        by_turn = rewards_by_turn(rewards, rollout.source.sampled_turns)
        by_turn[rollout.n_counted :] = torch.nan
        # `(B, F, 1 + turns)` for `F` functions: rewards of completions, then of turns, so that one call gathers both
        stacked = torch.cat([rewards_per_func(rewards)[..., None], by_turn], dim=2)
        stacked = accelerator.gather(stacked.to(accelerator.device))
        self.context.metrics.add(turn_metrics(stacked[..., 1:], self.functions.names))
        logged = stacked[..., 0].contiguous()
        is_held_out = [name in self.functions.held_out for name in self.functions.names]
        trained_on = [
            [None if skips else reward for skips, reward in zip(is_held_out, row, strict=True)] for row in rewards
        ]
        per_func = logged.masked_fill(torch.tensor(is_held_out, device=logged.device), torch.nan)
        return Rewards(trained_on, logged, per_func)

    def _call(self, rollout: Prompted, *, only_first: bool = False) -> list[list[float | None]]:
        """
        Returns this rank's rewards by completion and function. With `only_first`, only the first function is called,
        and what it logs is discarded.
        """
        encoder = self.prompting.encoder
        functions = self.functions
        if not functions.were_called:
            functions.were_called = True
            for warning in functions.warnings(rollout.source.messages, self.prompting.tokenizer):
                logger.warning(warning)
        early_rewards = None
        if only_first:
            functions = functions.first()
        elif rollout.source.flight is not None:
            # Some functions have already rewarded completions of asynchronous sampling, on their arrival
            early_rewards = rollout.source.flight.early_rewards
        live = self.context.live
        by_function = functions(rollout, live.state, encoder.media_rules, live.profile, early_rewards)
        rewards_by_completion = [[*row] for row in zip(*by_function.values(), strict=True)]
        trained_on = {name: values for name, values in by_function.items() if name not in functions.held_out}
        warn_of_unscorable([*zip(*trained_on.values(), strict=True)], trained_on, rollout.source)
        return rewards_by_completion

    def without_failed(self, rollout: Rollout) -> Rollout:
        """
        Returns a rollout with completions whose environment failed excluded from the loss, and counts them. All ranks
        must call this. Raises a `RuntimeError` if all failed in training, which hints at a common cause.
        """
        toolbox = self.prompting.toolbox
        if not (toolbox.factories or toolbox.standalone_tools):
            return rollout
        rows_and_errors = zip(rollout.source.row_indices, rollout.source.failures, strict=True)
        failed = [(row, error) for row, error in rows_and_errors if error is not None]
        n_failed, n = sum_over_ranks(self.context.accelerator, [len(failed), len(rollout)])
        self.context.metrics.add({"tools/environment_failures": event_count(n_failed)})
        for row, error in failed[:1]:  # one message stands for all failures
            reason = f"row {row}: the environment failed, {type(error).__name__}: {error}"
            if n_failed == n and self.context.is_training:
                raise RuntimeError(
                    f"All environments of a batch failed, so no completion can be trained on; {reason}"
                ) from error
            logger.warning(f"{reason}; its completion isn't trained on.", main_process_only=False)
        if not n_failed:
            return rollout
        is_valid = torch.tensor([[error is None] for error in rollout.source.failures])
        rollout = rollout.masked(is_valid.to(rollout.completion_mask))
        return replace(rollout, num_items_in_batch=self.context.accelerator.reduce(rollout.loss_mask.sum()))

    def bonus_of_contrast(self, rollout: Rollout, per_func: torch.Tensor) -> torch.Tensor | None:
        """
        Returns the bonus of all ranks' completions, `(N,)`, or `None` without `contrast_view`. The first reward
        function rewards the extra completions. All ranks must call this.
        """
        settings = self.context.args.contrast_view_settings
        accelerator = self.context.accelerator
        if not self.context.is_training or settings.view is None:
            return None
        contrast_rewards = torch.full((len(rollout),), torch.nan, device=accelerator.device)
        if any_rank(accelerator, rollout.source.contrast is not None):
            # The reward function may wait for all ranks. So a rank without extra completions rewards its first
            # completion. Its list of indices is empty, which drops the reward
            extra_rollout, indices = rollout.source.contrast or (rollout.select([0]), [])
            source = replace(extra_rollout.source, whole_groups=False)
            extra_rollout = replace(extra_rollout, source=source)
            rewards = rewards_per_func(self._call(extra_rollout, only_first=True))[: len(indices), 0]
            contrast_rewards[indices] = rewards.to(accelerator.device)
        contrast_rewards = accelerator.gather(contrast_rewards)
        group_size = self.context.group_size
        rewards = per_func[:, 0]
        bonus = contrast_bonus(
            rewards, contrast_rewards, group_size, ratio=settings.reward_ratio, bonus=settings.bonus
        )
        mask = in_same_groups(~contrast_rewards.isnan(), group_size)
        if mask.any():
            columns = {"accuracy": contrast_rewards, "accuracy_clean": rewards[mask], "bonus": bonus[mask]}
            self.context.metrics.add(
                {f"contrast/{name}": nan_mean(values, is_of_all_ranks=True) for name, values in columns.items()}
            )
        return bonus
