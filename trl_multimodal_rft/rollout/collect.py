# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stages of a rollout: encoding rows as prompts, also under a view of their media, and adding sampled completions."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from ..data.reading.refs import MediaError, MediaRef, iter_refs
from ..encoding.conversations import Contexts, Conversation
from ..encoding.join import same_prompt
from ..encoding.prompts import EncodedPrompt
from ..forward.trees import share_media
from ..views.views import View
from .environments import Environments
from .prompt_encoder import PromptEncoder
from .rollout import Rollout, Source
from .stream import EncodedRow


def collect(
    rows: Sequence[EncodedRow],
    encoder: PromptEncoder,
    toolbox: Environments,
    *,
    encodes_text: bool,
    group_size: int,
    pad_token_id: int,
    accelerator: Accelerator,
    views: Mapping[int, View] | None = None,
) -> Rollout:
    """
    Returns a rollout of `rows`, one row per completion, with environments and encoded prompts.

    A batch without media is encoded only if `encodes_text`. Otherwise the user's `rollout_func` tokenizes it. `views`
    has the view of each row's media, by row index.
    """
    dataset_rows, row_indices = [row.row for row in rows], [row.row_index for row in rows]
    source = Source(dataset_rows, row_indices, [row.messages for row in rows], failures=[None] * len(rows))
    source.tools = [toolbox.tools_in(None)] * len(rows)
    dataset_messages = source.messages
    if toolbox:
        source.environments, source.messages, source.failures = toolbox.reset_all(
            source.messages, dataset_rows, row_indices, encoder.checked_observation
        )
        source.tools = [*map(toolbox.tools_in, source.environments)]
    source.whole_groups = accelerator.num_processes == 1 or len(rows) % group_size == 0
    # Groups are counted over all ranks, since a group may straddle ranks. For example, with groups of 2 and 3 rows per
    # rank, rank 0 has the ids 0, 0, 1, and rank 1 has 1, 2, 2
    group_ids = (torch.arange(len(rows)) + accelerator.process_index * len(rows)) // group_size
    prompts, messages = [], source.messages
    if encodes_text or any(next(iter_refs(prompt), None) is not None for prompt in messages):
        for i, row in enumerate(rows):
            same_group = i > 0 and group_ids[i] == group_ids[i - 1]
            if row.prompt is not None:
                prompts.append(row.prompt)
            elif same_group and same_prompt(messages[i], messages[i - 1]):
                prompts.append(prompts[-1])
            else:
                view = None if views is None else views[row.row_index]
                encode = functools.partial(encoder.encode, row=row.row_index, view=view, **source.template_tools(i))
                try:
                    prompts.append(encode(messages[i]))
                except MediaError as error:
                    # Without an observation, the row is at fault. Without the row's own messages, no prompt is left
                    if messages[i] is dataset_messages[i] or dataset_messages[i] is None:
                        raise
                    # The environment's observation can't be encoded, which ends the trajectory
                    source.failures[i], messages[i] = error, dataset_messages[i]  # without the observation
                    prompts.append(encode(messages[i]))
    share_media(prompts)
    return Rollout(prompts, group_ids.to(accelerator.device), pad_token_id, source=source)


def view_prompts(rollout: Rollout, view: View, encoder: PromptEncoder) -> list[EncodedPrompt]:
    """
    Returns the prompts of completions, encoded with the media that a view puts in place of theirs. Completions of one
    prompt share the new prompt. If the view replaces no media of a prompt, the prompt stays the same object. Media
    that tools returned stay as they are. Random numbers depend on the view's seed and the row index.
    """
    encoded: dict[int, EncodedPrompt] = {}

    def under_view(index: int, prompt: EncodedPrompt, batch_messages: list[list[dict[str, Any]]]) -> EncodedPrompt:
        """Returns a prompt, with the messages `batch_messages[index]`, under the view."""
        if isinstance(prompt, Contexts):  # the messages of the first context are the prompt's
            contexts = zip(prompt.prompts, [batch_messages[index], *rollout.source.contexts[index]], strict=True)
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
        if id(prompt) not in encoded:
            encoded[id(prompt)] = encoder.encode(
                batch_messages[index],
                rollout.source.row_indices[index],
                view_of_row(view, batch_messages, rollout.source.row_indices, index),
                sampled=True,  # a context may hold turns that the policy sampled
                **rollout.source.template_tools(index),
            )
        return encoded[id(prompt)]

    prompts = [under_view(index, prompt, rollout.source.messages) for index, prompt in enumerate(rollout.prompts)]
    share_media(prompts)
    return prompts


def with_new_start(prompt: EncodedPrompt, start: EncodedPrompt) -> EncodedPrompt:
    """
    Returns `start`, with the tool results that `prompt` holds if it is a [`Conversation`]. In that case `start`
    replaces `prompt.prompt`, and must have the same number of tokens.
    """
    if not isinstance(prompt, Conversation):
        return start
    if start is prompt.prompt:
        return prompt
    return replace(prompt, prompt=start, media=start.media, mask_cache={}, on_device={})


def view_of_row(view: View, messages: Sequence[Any], row_indices: Sequence[int], index: int) -> View:
    """
    Returns the view, seeded for the row at `index` in the batch. A view that needs media of another row gets the media
    of the next row that has other media of the same modalities, or none if there is no such row in the batch.
    """
    view = view.seeded(*view.seed, row_indices[index])
    if not view.type.needs_other:
        return view
    media = _media_to_replace(view, messages[index])
    for step in range(1, len(messages)):
        other = _media_to_replace(view, messages[(index + step) % len(messages)])
        if {ref.modality for ref in other} >= {ref.modality for ref in media} and not same_prompt(other, media):
            return view.with_others(other)
    return view


def _media_to_replace(view: View, messages: Any) -> list[MediaRef]:
    return [ref for ref in iter_refs(messages) if view.applies_to(ref.modality)]


# Keys in the output of `rollout_func` that aren't columns for reward functions
_ROLLOUT_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def right_pad(rows: Sequence[Sequence], value: float, multiple: int | None = None) -> torch.Tensor:
    """Returns lists of numbers as a tensor `(N, C)`, padded on the right, with `C` a multiple of `multiple`."""
    longest = max([1, *map(len, rows)])  # a batch without tokens gets one column, which masks exclude
    longest += -longest % (multiple or 1)
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def take_custom_rollout(rollout: Rollout, output: dict[str, Any], placeholders: Collection[int]) -> tuple:
    """
    Returns the ids, log-probabilities and mask of sampled tokens in the output of `rollout_func`. Adds the output's
    other columns to the rollout, and the output's prompts if the rollout has none. Raises `ValueError` if a key is
    missing, a prompt with media was tokenized differently, or placeholders were sampled.
    """
    if missing := sorted({"prompt_ids", "completion_ids", "logprobs"} - output.keys()):
        raise ValueError(f"`rollout_func` must return the keys {missing} in its dictionary.")
    rollout.source.extra = {name: value for name, value in output.items() if name not in _ROLLOUT_KEYS}
    if rollout.prompts:
        rows = zip(rollout.prompts, output["prompt_ids"], output["completion_ids"], strict=True)
        for i, (prompt, prompt_ids, ids) in enumerate(rows):
            if list(prompt_ids) != prompt.input_ids.tolist():
                raise ValueError(
                    f"`rollout_func` gave {len(prompt_ids)} `prompt_ids` for completion {i} that differ from the "
                    f"{len(prompt)} of its prompt as the processor encodes it, placeholders included; return those of "
                    "`trainer.processing_class.apply_chat_template(..., tokenize=True, return_dict=True)`."
                )
            if not set(placeholders).isdisjoint(ids):
                raise ValueError(
                    f"`rollout_func` gave placeholders of media in `completion_ids` of completion {i}, but not "
                    "their media; use `tools` or `environment_factory` to show media to the model."
                )
    else:
        ids = [torch.tensor(row, dtype=torch.long) for row in output["prompt_ids"]]
        rollout.prompts = [EncodedPrompt(row, {}, {}, torch.arange(len(row))[None]) for row in ids]
    return output["completion_ids"], output["logprobs"], output.get("env_mask")


def add_completions(
    rollout: Rollout,
    ids: list[list[int]],
    logps: list[list[float | None]] | None,
    tool_mask: list[list[int]] | None,
    *,
    ended: list[bool],
    pad_to_multiple_of: int | None,
    mask_truncated: bool,
    accelerator: Accelerator,
) -> tuple[dict[str, float], int]:
    """
    Adds completions, their masks and their log-probabilities to a rollout. `tool_mask` is 0 on results of tools, and
    `None` without tools. `ended` is false for completions that were cut off. Returns TRL's metrics of lengths, and the
    number of prompt and sampled tokens, both over all ranks.
    """
    device, pad_token_id = accelerator.device, rollout.pad_token_id
    rollout.source.ids, rollout.source.ended = ids, ended
    rollout.completion_ids = right_pad(ids, pad_token_id, pad_to_multiple_of).to(device)
    mask = right_pad([[1] * len(row) for row in ids], 0, pad_to_multiple_of)
    has_ended = torch.tensor(ended)
    # Numbers of sampled tokens
    lengths = torch.tensor([*map(len, ids)] if tool_mask is None else [*map(sum, tool_mask)])
    if tool_mask is not None:
        rollout.tool_mask = right_pad(tool_mask, 1, pad_to_multiple_of).to(device)
    if logps is not None:
        rows = [[torch.nan if logp is None else logp for logp in row] for row in logps]
        rollout.sampling_per_token_logps = right_pad(rows, 0.0, pad_to_multiple_of).to(device)
    if mask_truncated:
        mask = mask * has_ended[:, None]
        if rollout.tool_mask is not None:
            rollout.tool_mask = rollout.tool_mask * has_ended[:, None].to(device)
    rollout.completion_mask = mask.to(device)
    prompt_lengths = torch.tensor([sum(map(len, prompt.contexts)) for prompt in rollout.prompts])
    n_loss_tokens = rollout.loss_mask.sum(1).cpu()
    table = torch.stack([prompt_lengths, lengths, has_ended.long(), n_loss_tokens], dim=1).to(device)
    prompt_lengths, lengths, has_ended, n_loss_tokens = accelerator.gather(table).cpu().unbind(1)
    rollout.num_items_in_batch = n_loss_tokens.sum().to(device)
    metrics = {"completions/clipped_ratio": 1 - has_ended.float().mean().item()}
    terminated = lengths[has_ended == 1]
    for infix, values in (("", lengths), ("terminated_", terminated if len(terminated) else torch.zeros(1))):
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_{infix}length"] = getattr(values.float(), name)().item()
    return metrics, int(prompt_lengths.sum() + lengths.sum())
