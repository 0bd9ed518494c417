# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views in sampling: a share of each group sees other media, or further completions do that it is contrasted with."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from trl.extras.profiling import profiling_context

from ..algorithms.shaping import contrast_bonus
from ..encoding.prompts import EncodedPrompt
from ..generation.transformers import Branches
from ..rollout.reward import checked_functions, reward_rollout
from ..rollout.rollout import Rollout
from ..rollout.samplers import Samples
from ..rollout.turns import without_tools
from ..rollout.views import as_schedule, last_of_groups, view_prompts
from ..views import View, as_view


class Views(NamedTuple):
    """Prompts of a rollout under views, by the places of their completions."""

    seen: dict[int, EncodedPrompt]  # of completions that are sampled from a view
    contrast: dict[int, EncodedPrompt]  # of further completions
    strength: float | None  # of the view that completions are sampled from

    def prompts(self, rollout: Rollout) -> list[EncodedPrompt]:
        """What is sampled from: a prompt for each completion, and for each further one."""
        own = (self.seen.get(i, prompt) for i, prompt in enumerate(rollout.prompts))
        return [*own, *self.contrast.values()]


def under_views(trainer: Any, rollout: Rollout, step: int) -> Views:
    """The prompts of a rollout under the views of training, if it is one, as they are at an optimizer step."""
    args, strength = trainer.args, None
    seen: dict[int, EncodedPrompt] = {}
    contrast: dict[int, EncodedPrompt] = {}
    is_training = trainer.model.training
    if is_training and args.rollout_view is not None:
        strength = as_schedule(args.rollout_view_schedule)(step / trainer.state.max_steps)
        view = as_view(args.rollout_view)
        view = view if strength == 1 else view.at(strength)
        seen = _seen(trainer, rollout, view, args.rollout_view_fraction, step)
    if is_training and args.contrast_view is not None:
        contrast = _seen(trainer, rollout, as_view(args.contrast_view), args.contrast_fraction, step)
    return Views(seen, contrast, strength)


def sample_with_views(trainer: Any, rollout: Rollout, branches: Branches | None) -> Samples:
    """
    Samples a rollout. In training, some of its completions may be sampled from a view, and further ones from another
    as its contrast. The rollout gets which ones, and the contrast.
    """
    step = trainer.state.global_step
    views = under_views(trainer, rollout, step)
    # In one call, which ranks make equally often
    samples = trainer.sampler(trainer.model_wrapped, views.prompts(rollout), step=step, branches=branches)
    return take_views(trainer, rollout, views, *samples)


def take_views(trainer: Any, rollout: Rollout, views: Views, ids: list, logps: Any) -> Samples:
    """A rollout's own samples of those of its prompts under views. It gets which are from a view, and the others."""
    n, (seen, contrast, strength) = len(rollout), views
    if strength is not None:
        rollout.from_view = torch.tensor([i in seen for i in range(n)], device=trainer.accelerator.device)
        trainer._log_metrics({"view/strength": strength})
    if contrast:
        places = [*contrast]
        part = rollout.select(places)
        completions = without_tools(part, ids[n:], trainer.processing_class, trainer.toolbox)
        rollout.contrast = replace(part, ids=ids[n:], completions=completions, whole_groups=False), places
    for i in seen if logps is not None else ():
        logps[i] = [None] * len(logps[i])  # given another prompt, they don't measure how far the engine is
    return ids[:n], logps and logps[:n]


def _seen(trainer: Any, rollout: Rollout, view: View, share: float, step: int) -> dict[int, EncodedPrompt]:
    """Prompts of the last completions of each group under a view, where it replaces a medium, by their places."""
    first = trainer.accelerator.process_index * len(rollout)
    places = last_of_groups(share, len(rollout), first, trainer._group_size)
    view = view.seeded(trainer.args.seed, step)
    prompts = view_prompts(rollout.select(places), view, trainer.prompts, trainer.toolbox)
    return {i: prompt for i, prompt in zip(places, prompts, strict=True) if prompt is not rollout.prompts[i]}


def bonus_of_contrast(trainer: Any, rollout: Rollout) -> torch.Tensor | None:
    """
    The bonus of all ranks' completions, `(N,)`, by what the first reward function gives the contrast; `None` without
    one. All ranks must call this.
    """
    args, device = trainer.args, trainer.accelerator.device
    if not trainer.model.training or args.contrast_view is None:
        return None
    found = torch.full((len(rollout),), torch.nan, device=device)
    if trainer._any_process(rollout.contrast is not None):
        # The function may wait for other ranks, so one without a contrast calls it with a completion of the rollout
        part, places = rollout.contrast or (replace(rollout.select([0]), whole_groups=False), [])
        names, funcs, processors = (
            each[:1] for each in (trainer.reward_func_names, trainer.reward_funcs, trainer.reward_processing_classes)
        )
        functions = checked_functions(part, names, funcs, processors, trainer.chat_template_kwargs, args.media_rules)
        given = {"trainer_state": trainer.state, "log_extra": _ignored, "log_metric": _ignored}
        loop, profile = getattr(trainer, "async_loop", None), functools.partial(profiling_context, trainer)
        rewards = reward_rollout(part, functions, given, loop, profile)[: len(places), 0]
        found[places] = rewards.to(device)
    found, size = trainer.accelerator.gather(found), trainer._group_size
    rewards = rollout.rewards_per_func[:, 0]
    bonus = contrast_bonus(rewards, found, size, ratio=args.contrast_ratio, bonus=args.contrast_bonus)
    if (has := _in_same_groups(~found.isnan(), size)).any():
        trainer._log_metrics(
            {
                "contrast/accuracy": found.nanmean().item(),
                "contrast/accuracy_clean": rewards[has].nanmean().item(),
                "contrast/bonus": bonus[has].mean().item(),
            }
        )
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


def _ignored(*values: Any) -> None:
    """What functions log of completions that aren't trained on."""
