# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Completions of a rollout: columns of tokens, masks and lengths.

In shapes, `N` is the number of completions, and `C` the number of columns for tokens of completions.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..encoding.prompts import EncodedPrompt
from .rollout import Rollout


# Keys in the output of `rollout_func` that aren't columns for reward functions
_ROLLOUT_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def right_pad(rows: Sequence[Sequence], value: float, multiple: int | None = None) -> torch.Tensor:
    """Returns lists of numbers as a tensor `(N, C)`, padded on the right, with `C` a multiple of `multiple`."""
    width = max([1, *map(len, rows)])  # a batch without tokens gets one column, which masks exclude
    width += -width % (multiple or 1)  # rounds up
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def take_custom_rollout(rollout: Rollout, output: dict[str, Any], placeholders: Collection[int]) -> tuple:
    """
    Returns the ids, log-probabilities and mask of sampled tokens in the output of `rollout_func`. Adds the output's
    other columns to the rollout, and the output's prompts if the rollout has none. Raises `ValueError` if a key is
    missing, a prompt with media was tokenized differently, or placeholders were sampled.
    """
    missing = sorted({"prompt_ids", "completion_ids", "logprobs"} - output.keys())
    if missing:
        raise ValueError(f"`rollout_func` returned a dictionary without the keys {missing}; add them.")
    rollout.source.extra = {name: value for name, value in output.items() if name not in _ROLLOUT_KEYS}
    if rollout.prompts:
        rows = zip(rollout.prompts, output["prompt_ids"], output["completion_ids"], strict=True)
        for i, (prompt, prompt_ids, completion_ids) in enumerate(rows):
            if list(prompt_ids) != prompt.input_ids.tolist():
                raise ValueError(
                    f"`rollout_func` returned {len(prompt_ids)} `prompt_ids` for completion {i}, which differ from "
                    f"the {len(prompt)} ids of its prompt by the processor, placeholders included; return the ids of "
                    "`trainer.processing_class.apply_chat_template(..., tokenize=True, return_dict=True)`."
                )
            if not set(placeholders).isdisjoint(completion_ids):
                raise ValueError(
                    f"`rollout_func` returned placeholders of media in `completion_ids` of completion {i}, but not "
                    "the media; use `tools` or `environment_factory` to show media to the model."
                )
    else:
        ids_by_prompt = [torch.tensor(row, dtype=torch.long) for row in output["prompt_ids"]]
        rollout.prompts = [EncodedPrompt(ids, {}, {}, torch.arange(len(ids))[None]) for ids in ids_by_prompt]
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
    `None` without tools. `ended` is false for completions that were cut off. With `mask_truncated`, the loss
    leaves such completions out. Returns TRL's metrics of lengths, and the number of prompt and sampled tokens, both
    over all ranks.
    """
    device = accelerator.device
    pad_token_id = rollout.pad_token_id
    rollout.source.ids = ids
    rollout.source.ended = ended
    rollout.completion_ids = right_pad(ids, pad_token_id, pad_to_multiple_of).to(device)
    mask = right_pad([[1] * len(row) for row in ids], 0, pad_to_multiple_of)
    has_ended = torch.tensor(ended)
    # Numbers of sampled tokens
    lengths = torch.tensor([*map(len, ids)] if tool_mask is None else [*map(sum, tool_mask)])
    if tool_mask is not None:  # padding may be 1, since `completion_mask` excludes it
        rollout.tool_mask = right_pad(tool_mask, 1, pad_to_multiple_of).to(device)
    if logps is not None:
        rows = [[torch.nan if logp is None else logp for logp in row] for row in logps]
        rollout.sampling_per_token_logps = right_pad(rows, 0.0, pad_to_multiple_of).to(device)
    if mask_truncated:
        mask = mask * has_ended[:, None]
        if rollout.tool_mask is not None:
            rollout.tool_mask = rollout.tool_mask * has_ended[:, None].to(device)
    rollout.completion_mask = mask.to(device)
    rollout.n_sampled = lengths.to(device)
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
