# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts of a rollout under a view."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..data.reading.refs import MediaRef, iter_refs
from ..encoding.conversations import Contexts, Conversation
from ..encoding.join import same_prompt
from ..encoding.prompt_encoder import PromptEncoder
from ..encoding.prompts import EncodedPrompt
from ..forward.trees import share_media
from ..views.views import View
from .rollout import Prompted


def view_prompts(rollout: Prompted, view: View, encoder: PromptEncoder) -> list[EncodedPrompt]:
    """
    Returns the prompts of a rollout's completions, encoded under a view. Completions of one prompt share the new
    prompt. If the view replaces no media of a prompt, the prompt stays the same object. Media that tools returned stay
    as they are. Random numbers depend on the view's seed and the row index.
    """
    new_prompts_by_id: dict[int, EncodedPrompt] = {}  # by `id` of the prompt without the view

    def under_view(index: int, prompt: EncodedPrompt, batch_messages: list[list[dict[str, Any]]]) -> EncodedPrompt:
        if isinstance(prompt, Contexts):  # the first context is the prompt, and later contexts replaced it
            contexts = zip(prompt.prompts, [batch_messages[index], *rollout.source.contexts[index]], strict=True)
            # Passes the messages of the whole batch, because a view may take media of another row
            new_prompts = [
                under_view(index, context, [*batch_messages[:index], messages, *batch_messages[index + 1 :]])
                for context, messages in contexts
            ]
            is_unchanged = all(
                context is new_prompt for context, new_prompt in zip(prompt.prompts, new_prompts, strict=True)
            )
            return prompt if is_unchanged else Contexts.of(new_prompts, prompt.ends)
        if isinstance(prompt, Conversation):
            return with_new_start(prompt, under_view(index, prompt.prompt, batch_messages))
        if not any(view.applies_to(modality) for modality in prompt.modalities):
            return prompt
        if id(prompt) not in new_prompts_by_id:
            new_prompts_by_id[id(prompt)] = encoder.encode(
                batch_messages[index],
                rollout.source.row_indices[index],
                view_of_row(view, batch_messages, rollout.source.row_indices, index),
                sampled=True,  # a context may hold turns that the policy sampled
                **rollout.source.template_tools(index),
            )
        return new_prompts_by_id[id(prompt)]

    prompts = [under_view(index, prompt, rollout.source.messages) for index, prompt in enumerate(rollout.prompts)]
    share_media(prompts)
    return prompts


def with_new_start(prompt: EncodedPrompt, start: EncodedPrompt) -> EncodedPrompt:
    """
    Replaces the prompt of a [`Conversation`] by `start`, and keeps the tool results. Returns `start` itself for any
    other prompt. `start` must have as many tokens as the prompt that it replaces.
    """
    if not isinstance(prompt, Conversation):
        return start
    if start is prompt.prompt:
        return prompt
    return replace(prompt, prompt=start, media=start.media, mask_cache={}, on_device={})


def view_of_row(view: View, messages: Sequence[Any], row_indices: Sequence[int], index: int) -> View:
    """
    Returns the view, seeded for the row at `index` in the batch. A view that needs media of another row gets the media
    of the next row that has other media of the same modalities. If the batch has no such row, the view gets no media.
    In a batch of 4 rows, the rows after row 2 are 3, 0 and 1.
    """
    view = view.seeded(*view.seed, row_indices[index])
    if not view.type.needs_other:
        return view
    media = _media_to_replace(view, messages[index])
    for distance in range(1, len(messages)):
        others = _media_to_replace(view, messages[(index + distance) % len(messages)])
        if {ref.modality for ref in others} >= {ref.modality for ref in media} and not same_prompt(others, media):
            return view.with_others(others)
    return view


def _media_to_replace(view: View, messages: Any) -> list[MediaRef]:
    return [ref for ref in iter_refs(messages) if view.applies_to(ref.modality)]
