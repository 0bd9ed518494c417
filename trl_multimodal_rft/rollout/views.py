# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts of a rollout under a view of their media, for which completions, and how strong."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..data.reading.refs import MediaRef, iter_refs
from ..encoding.conversations import Conversation
from ..encoding.join import same_prompt
from ..encoding.prompts import EncodedPrompt
from ..forward.trees import share_media
from ..spelling import check_settings, split_settings
from ..views import View
from .collect import template_tools
from .environments import Environments
from .prompts import PromptEncoder
from .rollout import Rollout


def view_prompts(rollout: Rollout, view: View, encoder: PromptEncoder, toolbox: Environments) -> list[EncodedPrompt]:
    """
    The prompts of completions under a view: one object for each of the rollout's, which is itself where the view
    replaces no medium. Media that tools have returned stay as they are. Random numbers depend on the view's seed and
    the number of the row.
    """
    found: dict[int, EncodedPrompt] = {}

    def seen(row: int, prompt: EncodedPrompt) -> EncodedPrompt:
        if isinstance(prompt, Conversation):
            return continued(prompt, seen(row, prompt.prompt))
        if not any(view.applies_to(kind) for kind in prompt.modalities):
            return prompt
        if id(prompt) not in found:
            found[id(prompt)] = encoder.encode(
                rollout.source.messages[row],
                rollout.source.row_indices[row],
                _of_row(view, rollout, row),
                **template_tools(toolbox, rollout.source.environments, row),
            )
        return found[id(prompt)]

    prompts = [seen(row, prompt) for row, prompt in enumerate(rollout.prompts)]
    share_media(prompts)
    return prompts


def continued(prompt: EncodedPrompt, first: EncodedPrompt) -> EncodedPrompt:
    """A prompt of the same tokens as the `first` one of a conversation in its place, with what tools returned."""
    if not isinstance(prompt, Conversation):
        return first
    if first is prompt.prompt:
        return prompt
    return replace(prompt, prompt=first, media=first.media, mask_cache={}, on_device={})


def _of_row(view: View, rollout: Rollout, row: int) -> View:
    """The view with the random numbers of a row and, where it shows one, with the media of the next other row."""
    view = view.seeded(*view.seed, rollout.source.row_indices[row])
    if not view.type.needs_other:
        return view
    own = _replaced(view, rollout.source.messages[row])
    for step in range(1, len(rollout)):
        others = _replaced(view, rollout.source.messages[(row + step) % len(rollout)])
        if {ref.kind for ref in others} >= {ref.kind for ref in own} and not same_prompt(others, own):
            return view.with_others(others)
    return view


def _replaced(view: View, messages: Any) -> list[MediaRef]:
    return [ref for ref in iter_refs(messages) if view.applies_to(ref.kind)]


def sigmoid(progress: float, midpoint: float = 2 / 3, steepness: float = 30.0) -> float:
    r"""
    The decay of a strength in [NoisyRollout](https://huggingface.co/papers/2504.13055), to a share
    $1 - 1 / (1 + e^{-\lambda (t - \gamma) / T})$ of it, where $t / T$ is the progress of the run, $\gamma / T$ the
    midpoint and $\lambda$ the steepness.
    """
    return (1 - math.tanh(steepness * (progress - midpoint) / 2)) / 2


# Strength of a view at a share of the run
SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "sigmoid": sigmoid,
}


def as_schedule(text: str) -> Callable[[float], float]:
    """
    A schedule by its name, with settings behind it: `"sigmoid(midpoint=0.5)"`.

    Raises `ValueError` if there is no such schedule, or it has no such setting.
    """
    name, settings = split_settings(text)
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}; name one of {', '.join(map(repr, SCHEDULES))}.")
    check_settings(SCHEDULES[name], name, settings or {})
    return functools.partial(SCHEDULES[name], **(settings or {}))


def last_of_groups(share: float, n: int, first: int, group_size: int) -> list[int]:
    """
    Which of `n` completions, from the place `first` of all ranks' on, are the last of their group, so many as a share
    of it, rounded down.
    """
    start = group_size - int(share * group_size)
    return [i for i in range(n) if (first + i) % group_size >= start]
