# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views in sampling: `rollout_view` for a share of each group, and `contrast_view` for extra completions."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...algorithms.metrics import Metric, average, nan_mean
from ...encoding.prompt_encoder import PromptEncoder
from ...encoding.prompts import EncodedPrompt
from ...rollout.rollout import Drawn, Prompted
from ...rollout.turns import with_one_turn
from ...rollout.view_prompts import view_prompts
from ...views.view_options import as_schedule, last_of_groups
from ...views.views import View
from .context import Context


class ViewPrompts(NamedTuple):
    """Prompts of a rollout under views, by the batch indices of their completions."""

    share: dict[int, EncodedPrompt]  # prompts under `rollout_view`, for a share of each group
    contrast: dict[int, EncodedPrompt]  # prompts under `contrast_view`, for extra completions
    strength: float | None  # strength of `rollout_view`, or `None` without it

    def prompts(self, rollout: Prompted) -> list[EncodedPrompt]:
        """Returns the prompts to sample from: first for the rollout's completions, then for the extra completions."""
        return [*(self.share.get(i, prompt) for i, prompt in enumerate(rollout.prompts)), *self.contrast.values()]


def prompts_under_views(context: Context, encoder: PromptEncoder, rollout: Prompted, step: int) -> ViewPrompts:
    """Returns the prompts of a rollout under the views of an optimizer step. In evaluation, there are no views."""
    share_settings = context.args.rollout_view_settings
    contrast_settings = context.args.contrast_view_settings
    strength = None
    share: dict[int, EncodedPrompt] = {}
    contrast: dict[int, EncodedPrompt] = {}
    if context.is_training and share_settings.view is not None:
        strength = as_schedule(share_settings.schedule)(step / context.live.state.max_steps)
        view = share_settings.view if strength == 1 else share_settings.view.scaled(strength)
        share = _last_prompts_under(context, encoder, rollout, view, share_settings.fraction, step)
    if context.is_training and contrast_settings.view is not None:
        contrast = _last_prompts_under(
            context, encoder, rollout, contrast_settings.view, contrast_settings.fraction, step
        )
    return ViewPrompts(share, contrast, strength)


def without_extra(
    context: Context, encoder: PromptEncoder, prompted: Prompted, views: ViewPrompts, drawn: Drawn
) -> Drawn:
    """
    Returns completions without the extra ones of `contrast_view`, which get into the field `contrast` with the index
    that they belong to; completions that were sampled under a view lose their log-probabilities.
    """
    n = len(prompted)
    share, contrast, strength = views
    from_view = extra = None
    if strength is not None:
        from_view = torch.tensor([i in share for i in range(n)], device=context.accelerator.device)
        context.metrics.add({"view/strength": average(strength)})
    if contrast:
        indices = [*contrast]
        selected = with_one_turn(prompted.select(indices), drawn.ids[n:], encoder.processor)
        extra = replace(selected, source=replace(selected.source, whole_groups=False)), indices
    logps: list[list[float | None]] | None = None
    if drawn.logps is not None:
        # Log-probabilities from a view can't correct for the engine, because the policy is trained on the clean media
        logps = [[None] * len(row) if i in share else row for i, row in enumerate(drawn.logps[:n])]
    return drawn._replace(ids=drawn.ids[:n], logps=logps, from_view=from_view, contrast=extra)


def _last_prompts_under(
    context: Context, encoder: PromptEncoder, rollout: Prompted, view: View, fraction: float, step: int
) -> dict[int, EncodedPrompt]:
    """
    Returns the prompts under a view, by batch index, of the last completions of each group. Leaves out prompts that
    the view doesn't change. With groups of 4 and a `fraction` of 0.5, these are the completions 2 and 3 of a group.
    """
    offset = context.accelerator.process_index * len(rollout)
    indices = last_of_groups(fraction, len(rollout), offset, context.group_size)
    prompts = view_prompts(rollout.select(indices), view.seeded(context.args.seed, step), encoder)
    return {i: prompt for i, prompt in zip(indices, prompts, strict=True) if prompt is not rollout.prompts[i]}


def view_metrics(rewards: torch.Tensor, from_view: torch.Tensor, group_size: int) -> dict[str, Metric]:
    """
    Returns the mean rewards of completions that were sampled from a view, and of the other completions of their
    groups. Returns no metrics if no completion is from a view. `rewards` and `from_view` are of all ranks, `(N,)`.
    """
    if not from_view.any():
        return {}
    clean = in_same_groups(from_view, group_size) & ~from_view
    rewards_by_name = {"view/reward": rewards[from_view], "view/reward_clean": rewards[clean]}
    return {name: nan_mean(values, is_of_all_ranks=True) for name, values in rewards_by_name.items()}


def in_same_groups(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Returns the mask `(N,)` of all completions in groups with a completion in `mask`."""
    return mask.view(-1, group_size).any(1).repeat_interleave(group_size)
