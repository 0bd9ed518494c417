# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views in sampling: `rollout_view` for a share of each group, and `contrast_view` for extra completions."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...algorithms.shaping import contrast_bonus
from ...encoding.prompts import EncodedPrompt
from ...engines.samplers import Sampler, Samples
from ...engines.transformers import Branches
from ...rollout.estimates import rewards_per_func
from ...rollout.ranks import any_rank
from ...rollout.rollout import Rollout, require
from ...rollout.turns import completions_without_tools
from ...rollout.view_prompts import view_prompts
from ...views.options import as_schedule, last_of_groups
from ...views.views import View
from .run import Run


class ViewPrompts(NamedTuple):
    """Prompts of a rollout under views, by the batch indices of their completions."""

    share: dict[int, EncodedPrompt]  # prompts under `rollout_view`, for a share of each group
    contrast: dict[int, EncodedPrompt]  # prompts under `contrast_view`, for extra completions
    strength: float | None  # strength of `rollout_view`, or `None` without it

    def prompts(self, rollout: Rollout) -> list[EncodedPrompt]:
        """Returns the prompts to sample from: first for the rollout's completions, then for the extra completions."""
        return [*(self.share.get(i, prompt) for i, prompt in enumerate(rollout.prompts)), *self.contrast.values()]


def prompts_under_views(run: Run, rollout: Rollout, step: int) -> ViewPrompts:
    """Returns the prompts of a rollout under the views of an optimizer step. In evaluation, there are no views."""
    share_settings = run.args.rollout_view_settings
    contrast_settings = run.args.contrast_view_settings
    strength = None
    share: dict[int, EncodedPrompt] = {}
    contrast: dict[int, EncodedPrompt] = {}
    if run.is_training and share_settings.view is not None:
        strength = as_schedule(share_settings.schedule)(step / run.live.state.max_steps)
        view = share_settings.view if strength == 1 else share_settings.view.scaled(strength)
        share = _last_prompts_under(run, rollout, view, share_settings.fraction, step)
    if run.is_training and contrast_settings.view is not None:
        contrast = _last_prompts_under(run, rollout, contrast_settings.view, contrast_settings.fraction, step)
    return ViewPrompts(share, contrast, strength)


def sample_with_views(run: Run, sampler: Sampler, rollout: Rollout, branches: Branches | None) -> Samples:
    """
    Samples the completions of a rollout. In training, some completions may be sampled under `rollout_view`, and
    extra completions under `contrast_view`. [`record_views`] records both in the rollout.
    """
    views = prompts_under_views(run, rollout, run.step)
    # One call, as all ranks must call the sampler equally often
    samples = sampler(run.live.model_wrapped, views.prompts(rollout), step=run.step, branches=branches)
    return record_views(run, rollout, views, *samples)


def record_views(
    run: Run, rollout: Rollout, views: ViewPrompts, ids: list[list[int]], logps: list[list[float | None]] | None
) -> Samples:
    """
    Returns the samples without the extra completions of `contrast_view`, and sets `from_view` and `contrast` of the
    rollout's source.

    With 4 completions, `share` at index 3 and `contrast` at index 2, the samples have 5 entries. The first 4 are
    returned, of which index 3 loses its log-probabilities. The last one goes into `contrast`, with the index 2.
    """
    n = len(rollout)
    share, contrast, strength = views
    if strength is not None:
        rollout.source.from_view = torch.tensor([i in share for i in range(n)], device=run.accelerator.device)
        run.metrics.add({"view/strength": strength})
    if contrast:
        indices = [*contrast]
        extra_rollout = rollout.select(indices)
        completions = completions_without_tools(extra_rollout, ids[n:], run.prompts.processor)
        source = replace(extra_rollout.source, ids=ids[n:], completions=completions, whole_groups=False)
        rollout.source.contrast = replace(extra_rollout, source=source), indices
    if logps is None:
        return ids[:n], None
    # Log-probabilities from a view can't correct for the engine, because the policy is trained on the clean media
    return ids[:n], [[None] * len(row) if i in share else row for i, row in enumerate(logps[:n])]


def _last_prompts_under(
    run: Run, rollout: Rollout, view: View, fraction: float, step: int
) -> dict[int, EncodedPrompt]:
    """
    Returns the prompts under a view, by batch index, of the last completions of each group. Leaves out prompts that
    the view doesn't change. With groups of 4 and a `fraction` of 0.5, these are the completions 2 and 3 of a group.
    """
    offset = run.accelerator.process_index * len(rollout)
    indices = last_of_groups(fraction, len(rollout), offset, run.group_size)
    prompts = view_prompts(rollout.select(indices), view.seeded(run.args.seed, step), run.prompts)
    return {i: prompt for i, prompt in zip(indices, prompts, strict=True) if prompt is not rollout.prompts[i]}


def bonus_of_contrast(run: Run, rollout: Rollout) -> torch.Tensor | None:
    """
    Returns the bonus of all ranks' completions, `(N,)`, or `None` without `contrast_view`. The first reward function
    rewards the extra completions. All ranks must call this.
    """
    settings = run.args.contrast_view_settings
    device = run.accelerator.device
    if not run.is_training or settings.view is None:
        return None
    contrast_rewards = torch.full((len(rollout),), torch.nan, device=device)
    if any_rank(run.accelerator, rollout.source.contrast is not None):
        # The reward function may wait for all ranks. So a rank without extra completions rewards its first completion.
        # Its list of indices is empty, which drops the reward
        extra_rollout, indices = rollout.source.contrast or (rollout.select([0]), [])
        extra_rollout.source.whole_groups = False
        rewards = rewards_per_func(run.call_reward_functions(extra_rollout, only_first=True))[: len(indices), 0]
        contrast_rewards[indices] = rewards.to(device)
    contrast_rewards = run.accelerator.gather(contrast_rewards)
    group_size = run.group_size
    rewards = require(rollout.rewards.per_func)[:, 0]
    bonus = contrast_bonus(rewards, contrast_rewards, group_size, ratio=settings.reward_ratio, bonus=settings.bonus)
    mask = _in_same_groups(~contrast_rewards.isnan(), group_size)
    if mask.any():
        means = {
            "accuracy": contrast_rewards.nanmean(),
            "accuracy_clean": rewards[mask].nanmean(),
            "bonus": bonus[mask].mean(),
        }
        run.metrics.add({f"contrast/{name}": value.item() for name, value in means.items()})
    return bonus


def view_metrics(rewards: torch.Tensor, from_view: torch.Tensor, group_size: int) -> dict[str, float]:
    """
    Returns the mean rewards of completions that were sampled from a view, and of the other completions of their
    groups. Returns no metrics if no completion is from a view. `rewards` and `from_view` are of all ranks, `(N,)`.
    """
    if not from_view.any():
        return {}
    clean = _in_same_groups(from_view, group_size) & ~from_view
    means = {"view/reward": rewards[from_view].nanmean(), "view/reward_clean": rewards[clean].nanmean()}
    return {name: value.item() for name, value in means.items()}


def _in_same_groups(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Returns the mask `(N,)` of all completions in groups with a completion in `mask`."""
    return mask.view(-1, group_size).any(1).repeat_interleave(group_size)
