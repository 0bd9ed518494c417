# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views in sampling: a share of each group sees other media, or further completions do that it is contrasted with."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ..algorithms.shaping import contrast_bonus
from ..encoding.prompts import EncodedPrompt
from ..generation.transformers import Branches
from ..rollout.collect import view_prompts
from ..rollout.ranks import any_rank
from ..rollout.reward import rewards_per_func
from ..rollout.rollout import Rollout, require
from ..rollout.samplers import Sampler, Samples
from ..rollout.turns import without_tools
from ..rollout.view_options import as_schedule, last_of_groups
from ..views import View
from .run import Run


class Views(NamedTuple):
    """Prompts of a rollout under views, by the indices of their completions."""

    share: dict[int, EncodedPrompt]  # of completions that are sampled from a view
    contrast: dict[int, EncodedPrompt]  # of further completions
    strength: float | None  # of the view that completions are sampled from

    def prompts(self, rollout: Rollout) -> list[EncodedPrompt]:
        """What is sampled from: a prompt for each completion, and for each further one."""
        return [*(self.share.get(i, prompt) for i, prompt in enumerate(rollout.prompts)), *self.contrast.values()]


def under_views(run: Run, rollout: Rollout, step: int) -> Views:
    """The prompts of a rollout under the views of training, if it is one, as they are at an optimizer step."""
    rollouts, others, strength = run.args.rollout_view_settings, run.args.contrast_view_settings, None
    share: dict[int, EncodedPrompt] = {}
    contrast: dict[int, EncodedPrompt] = {}
    if run.is_training and rollouts.view is not None:
        strength = as_schedule(rollouts.schedule)(step / run.state().max_steps)
        view = rollouts.view if strength == 1 else rollouts.view.at(strength)
        share = _last_prompts_under(run, rollout, view, rollouts.fraction, step)
    if run.is_training and others.view is not None:
        contrast = _last_prompts_under(run, rollout, others.view, others.fraction, step)
    return Views(share, contrast, strength)


def sample_with_views(run: Run, sampler: Sampler, rollout: Rollout, branches: Branches | None) -> Samples:
    """
    Samples a rollout. In training, some of its completions may be sampled from a view, and further ones from another
    as its contrast. The rollout gets which ones, and the contrast.
    """
    views = under_views(run, rollout, run.step)
    # In one call, which ranks make equally often
    samples = sampler(run.wrapped(), views.prompts(rollout), step=run.step, branches=branches)
    return take_views(run, rollout, views, *samples)


def take_views(
    run: Run, rollout: Rollout, views: Views, ids: list[list[int]], logps: list[list[float | None]] | None
) -> Samples:
    """A rollout's own samples of those of its prompts under views. It gets which are from a view, and the others."""
    n, (share, contrast, strength) = len(rollout), views
    if strength is not None:
        rollout.source.from_view = torch.tensor([i in share for i in range(n)], device=run.accelerator.device)
        run.metrics.add({"view/strength": strength})
    if contrast:
        indices = [*contrast]
        part = rollout.select(indices)
        completions = without_tools(part, ids[n:], run.prompts.processor)
        source = replace(part.source, ids=ids[n:], completions=completions, whole_groups=False)
        rollout.source.contrast = replace(part, source=source), indices
    if logps is None:
        return ids[:n], None
    # Given another prompt, those of a view don't measure how far the engine is
    return ids[:n], [[None] * len(each) if i in share else each for i, each in enumerate(logps[:n])]


def _last_prompts_under(
    run: Run, rollout: Rollout, view: View, fraction: float, step: int
) -> dict[int, EncodedPrompt]:
    """Prompts of the last completions of each group under a view, where it replaces a medium, by their indices."""
    first = run.accelerator.process_index * len(rollout)
    indices = last_of_groups(fraction, len(rollout), first, run.group_size)
    prompts = view_prompts(rollout.select(indices), view.seeded(run.args.seed, step), run.prompts)
    return {i: prompt for i, prompt in zip(indices, prompts, strict=True) if prompt is not rollout.prompts[i]}


def bonus_of_contrast(run: Run, rollout: Rollout) -> torch.Tensor | None:
    """
    The bonus of all ranks' completions, `(N,)`, by what the first reward function gives the contrast; `None` without
    one. All ranks must call this.
    """
    others, device = run.args.contrast_view_settings, run.accelerator.device
    if not run.is_training or others.view is None:
        return None
    found = torch.full((len(rollout),), torch.nan, device=device)
    if any_rank(run.accelerator, rollout.source.contrast is not None):
        # The function may wait for other ranks, so one without a contrast calls it with a completion of the rollout
        part, indices = rollout.source.contrast or (rollout.select([0]), [])
        part.source.whole_groups = False
        rewards = rewards_per_func(run.reward(part, only_first=True, logs=False))[: len(indices), 0]
        found[indices] = rewards.to(device)
    found, size = run.accelerator.gather(found), run.group_size
    rewards = require(rollout.rewards.per_func)[:, 0]
    bonus = contrast_bonus(rewards, found, size, ratio=others.reward_ratio, bonus=others.bonus)
    if (has := _in_same_groups(~found.isnan(), size)).any():
        means = {"accuracy": found.nanmean(), "accuracy_clean": rewards[has].nanmean(), "bonus": bonus[has].mean()}
        run.metrics.add({f"contrast/{name}": value.item() for name, value in means.items()})
    return bonus


def view_metrics(rewards: torch.Tensor, from_view: torch.Tensor, group_size: int) -> dict[str, float]:
    """
    Mean rewards of completions that were sampled from a view, and of the others of their groups; nothing without any.
    Shapes: both `(N,)`, of all ranks.
    """
    if not from_view.any():
        return {}
    clean = _in_same_groups(from_view, group_size) & ~from_view
    means = {"view/reward": rewards[from_view].nanmean(), "view/reward_clean": rewards[clean].nanmean()}
    return {name: value.item() for name, value in means.items()}


def _in_same_groups(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Which completions are in a group with one that is marked, `(N,)`."""
    return mask.view(-1, group_size).any(1).repeat_interleave(group_size)
