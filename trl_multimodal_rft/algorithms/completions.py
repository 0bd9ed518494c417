# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Where responses end."""

from collections.abc import Sequence

import torch


def up_to_first_end(responses: torch.Tensor, eos_token_ids: Sequence[int]) -> torch.Tensor:
    """
    Tokens of responses up to the first end-of-sequence token, that token included.

    Args:
        responses (`torch.Tensor`):
            Sampled ids, shape `(B, N)`.
        eos_token_ids (`Sequence[int]`):
            Ids that end a response.

    Returns:
        `torch.Tensor`: Boolean mask, shape `(B, N)`.
    """
    is_eos = _are(responses, eos_token_ids).long()
    return is_eos.cumsum(1) - is_eos == 0


def mask_responses(
    sequences: torch.Tensor,
    input_len: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    prompt_attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Masks of sampled sequences: a response goes up to its first end-of-sequence token, that token included.

    Args:
        sequences (`torch.Tensor`):
            Padded prompts and responses, shape `(B, S)`; left as they are.
        input_len (`int`):
            Length of the padded prompts.
        eos_token_id (`int` or `Sequence[int]`, *optional*):
            Tokens that end a response.
        pad_token_id (`int`):
            Token written after the end. Where it ends no response, those at the end of a row are padding: the response
            was stopped otherwise.
        prompt_attention_mask (`torch.Tensor`, *optional*):
            1 on the tokens of the prompts, shape `(B, input_len)`. By default only leading padding is recognized.

    Returns:
        `tuple`: A copy of the sequences with padding after the responses, their attention mask `(B, S)` (`int64`), the
        action mask `(B, S - input_len)` (`bool`), and whether each response was cut off, `(B,)`.
    """
    eos_ids = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    prompts, responses = sequences[:, :input_len], sequences[:, input_len:]
    actions = up_to_first_end(responses, eos_ids)
    truncated = ~_are(responses, eos_ids).any(1)
    if pad_token_id not in eos_ids:
        trailing = (responses == pad_token_id).long().flip(1).cumprod(1).flip(1).bool()
        actions = actions & ~trailing
        truncated = truncated & ~trailing.any(1)
    if prompt_attention_mask is None:
        prompt_attention_mask = (prompts == pad_token_id).long().cumprod(1) == 0
    sequences = torch.cat([prompts, responses.masked_fill(~actions, pad_token_id)], dim=1)
    attention_mask = torch.cat([prompt_attention_mask.long(), actions.long()], dim=1)
    return sequences, attention_mask, actions, truncated


def _are(ids: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    return torch.isin(ids, torch.tensor(wanted, dtype=ids.dtype, device=ids.device))
