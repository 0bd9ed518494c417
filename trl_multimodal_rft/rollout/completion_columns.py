# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Completions of a rollout: columns of tokens, masks and lengths.

In shapes, `N` is the number of completions, and `C` the number of columns for tokens of completions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..algorithms.metrics import Metric, largest, nan_mean, share, smallest
from ..encoding.processors import ends_with
from ..encoding.prompts import EncodedPrompt
from .rollout import Drawn, Prompted, Rollout


# Keys in the output of `rollout_func` that aren't columns for reward functions
_ROLLOUT_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


@dataclass(frozen=True)
class Ends:
    """Tokens and texts that end a completion."""

    ids: Sequence[int]
    texts: Sequence[str] = ()

    def end(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
        """Returns whether a completion ends with a token or a text that ends completions."""
        ends_with_token = bool(ids) and ids[-1] in (*self.ids, tokenizer.pad_token_id)
        return ends_with_token or ends_with(ids, self.texts, tokenizer)


def right_pad(rows: Sequence[Sequence], value: float, multiple: int | None = None) -> torch.Tensor:
    """Returns lists of numbers as a tensor `(N, C)`, padded on the right, with `C` a multiple of `multiple`."""
    width = max([1, *map(len, rows)])  # a batch without tokens gets one column, which masks exclude
    width += -width % (multiple or 1)  # rounds up
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def take_custom_rollout(
    prompted: Prompted, output: dict[str, Any], placeholders: Collection[int]
) -> tuple[Prompted, Drawn]:
    """
    Returns the completions in the output of `rollout_func`, and the prompts with the output's other columns, and with
    the output's prompts if there are none. Raises `ValueError` if a key is
    missing, a prompt with media was tokenized differently, or placeholders were sampled.
    """
    missing = sorted({"prompt_ids", "completion_ids", "logprobs"} - output.keys())
    if missing:
        raise ValueError(f"`rollout_func` returned a dictionary without the keys {missing}; add them.")
    extra = {name: value for name, value in output.items() if name not in _ROLLOUT_KEYS}
    prompts = prompted.prompts
    if prompts:
        rows = zip(prompts, output["prompt_ids"], output["completion_ids"], strict=True)
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
        prompts = [EncodedPrompt(ids, {}, {}, torch.arange(len(ids))[None]) for ids in ids_by_prompt]
    prompted = replace(prompted, prompts=prompts, source=replace(prompted.source, extra=extra))
    return prompted, Drawn(output["completion_ids"], output["logprobs"], output.get("env_mask"))


def with_completions(
    prompted: Prompted,
    drawn: Drawn,
    *,
    ended: list[bool],
    pad_to_multiple_of: int | None,
    mask_truncated: bool,
    accelerator: Accelerator,
) -> tuple[Rollout, dict[str, Metric], int]:
    """
    Returns the rollout of completions. `ended` is false for completions that were cut off. With `mask_truncated`, the
    loss leaves such completions out. Also returns TRL's metrics of lengths, and the number of prompt and sampled
    tokens, both over all ranks.
    """
    device = accelerator.device
    ids = drawn.ids
    tool_mask = drawn.mask
    mask = right_pad([[1] * len(row) for row in ids], 0, pad_to_multiple_of)
    has_ended = torch.tensor(ended)
    # Numbers of sampled tokens
    lengths = torch.tensor([*map(len, ids)] if tool_mask is None else [*map(sum, tool_mask)])
    sampled = sampling_logps = None
    if tool_mask is not None:  # padding may be 1, since `completion_mask` excludes it
        sampled = right_pad(tool_mask, 1, pad_to_multiple_of).to(device)
    if drawn.logps is not None:
        rows = [[torch.nan if logp is None else logp for logp in row] for row in drawn.logps]
        sampling_logps = right_pad(rows, 0.0, pad_to_multiple_of).to(device)
    is_counted = torch.ones(len(ids), dtype=torch.long)
    is_counted[prompted.n_counted :] = 0  # in evaluation, another rank counts these
    mask = mask * is_counted[:, None]
    lengths = lengths * is_counted
    if mask_truncated:
        mask = mask * has_ended[:, None]
        sampled = None if sampled is None else sampled * has_ended[:, None].to(device)
    rollout = Rollout(
        prompted.prompts,
        prompted.group_ids,
        prompted.pad_token_id,
        replace(prompted.source, ids=ids, ended=ended),
        prompted.step,
        completion_ids=right_pad(ids, prompted.pad_token_id, pad_to_multiple_of).to(device),
        completion_mask=mask.to(device),
        tool_mask=sampled,
        n_sampled=lengths.to(device),
        sampling_per_token_logps=sampling_logps,
    )
    prompt_lengths = torch.tensor([sum(map(len, prompt.contexts)) for prompt in rollout.prompts])
    n_loss_tokens = rollout.loss_mask.sum(1).cpu()
    table = torch.stack([is_counted, prompt_lengths, lengths, has_ended.long(), n_loss_tokens], dim=1).to(device)
    table = accelerator.gather(table).cpu()
    _, prompt_lengths, lengths, has_ended, n_loss_tokens = table[table[:, 0] == 1].unbind(1)
    metrics = {"completions/clipped_ratio": nan_mean(1 - has_ended.float(), is_of_all_ranks=True)}
    for infix, values in (("", lengths), ("terminated_", lengths[has_ended == 1])):
        metrics[f"completions/mean_{infix}length"] = share(values.sum(), len(values), is_of_all_ranks=True)
        metrics[f"completions/min_{infix}length"] = smallest(values.float(), or_zero=True, is_of_all_ranks=True)
        metrics[f"completions/max_{infix}length"] = largest(values.float(), or_zero=True, is_of_all_ranks=True)
    rollout = replace(rollout, num_items_in_batch=n_loss_tokens.sum().to(device))
    return rollout, metrics, int(prompt_lengths.sum() + lengths.sum())
