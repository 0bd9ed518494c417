# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Attention and action masks of sampled sequences, and packed sequences one by one."""

from collections.abc import Sequence

import torch

from ...engines.token_loop import up_to_first_end


def mask_completions(
    sequences: torch.Tensor,
    input_len: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    prompt_attention_mask: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Returns masks of sampled sequences. A completion ends with its first end-of-sequence token.

    Example: 2 is the end-of-sequence token, 0 is padding. The completions `[5, 2, 7]`, `[5, 0, 0]` and `[5, 6, 7]`
    have the action masks `[1, 1, 0]`, `[1, 0, 0]` and `[1, 1, 1]`. Only the third completion is truncated.

    Args:
        sequences (`torch.Tensor`):
            Padded prompts and completions, shape `(B, S)`.
        input_len (`int`):
            Length of the padded prompts.
        eos_token_id (`int` or `Sequence[int]`, *optional*):
            Tokens that end a completion.
        pad_token_id (`int`):
            Padding token. If it isn't an end-of-sequence token, a completion that ends with padding counts as
            complete, for example because of a stop string.
        prompt_attention_mask (`torch.Tensor`, *optional*):
            1 on the tokens of the prompts, shape `(B, input_len)`. By default, only leading padding is masked.
        lengths (`Sequence[int]`, *optional*):
            Number of sampled tokens per completion. By default, padding is told by its token, and the first padding
            token ends the completion if it is an end-of-sequence token.

    Returns:
        `tuple`: A copy of the sequences with padding after the completions, their attention mask `(B, S)` (`int64`),
        the action mask `(B, S - input_len)` (`bool`), and whether each completion was truncated, `(B,)`.
    """
    eos_ids = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    prompts = sequences[:, :input_len]
    completions = sequences[:, input_len:]
    is_action = up_to_first_end(completions, eos_ids)
    truncated = ~torch.isin(
        completions, torch.tensor(eos_ids, dtype=completions.dtype, device=completions.device)
    ).any(1)
    if lengths is not None:
        columns = torch.arange(completions.size(1), device=completions.device)
        trailing_padding = columns >= torch.tensor(lengths, device=completions.device)[:, None]
    elif pad_token_id not in eos_ids:
        trailing_padding = (completions == pad_token_id).long().flip(1).cumprod(1).flip(1).bool()
    else:  # the first padding is an end, after which `is_action` is false already
        trailing_padding = torch.zeros_like(is_action)
    is_action = is_action & ~trailing_padding
    truncated = truncated & ~trailing_padding.any(1)
    if prompt_attention_mask is None:
        prompt_attention_mask = (prompts == pad_token_id).long().cumprod(1) == 0
    sequences = torch.cat([prompts, completions.masked_fill(~is_action, pad_token_id)], dim=1)
    return sequences, torch.cat([prompt_attention_mask.long(), is_action.long()], dim=1), is_action, truncated


def packed_rows(
    sequences: torch.Tensor, num_actions: int | Sequence[int] | None, lengths: Sequence[int], pad_len: int = 0
) -> tuple[list[torch.Tensor], list[int]]:
    """
    Returns the samples of packed sequences `(1, sum of S + pad_len)`, and the index of each sample's first action. A
    completion is a sample's last `num_actions` tokens: with `lengths=[4, 2]` and `num_actions=[2, 1]`, the row `[p, q,
    a, b, r, c]` has the samples `[p, q, a, b]` and `[r, c]`, whose actions begin at 2 and 1.
    """
    n_tokens = sum(lengths) + pad_len
    if sequences.shape != (1, n_tokens):
        names = "`packed_seq_lens` and `pad_len`" if pad_len else "`packed_seq_lens`"
        raise ValueError(
            f"{names} add up to {n_tokens}, but the sequences have the shape {tuple(sequences.shape)}; pass the "
            "length of each sample."
        )
    if num_actions is None:
        raise ValueError("Packed sequences need `num_actions`, one number per sample.")
    n_actions = [num_actions] * len(lengths) if isinstance(num_actions, int) else list(map(int, num_actions))
    if len(n_actions) != len(lengths):
        raise ValueError(f"There are {len(n_actions)} `num_actions` for {len(lengths)} packed samples.")
    for index, (n, length) in enumerate(zip(n_actions, lengths, strict=True)):
        check_num_actions(n, length, f" of sample {index}")
    rows = sequences[0, : sum(lengths)].split(lengths)
    return [*rows], [length - n for length, n in zip(lengths, n_actions, strict=True)]


def check_num_actions(num_actions: int, length: int, label: str = "") -> None:
    """A token must precede the first action, because it predicts the action."""
    if not 0 <= num_actions < length:
        raise ValueError(
            f"`num_actions`{label} ({num_actions}) must be between 0 and {length - 1}: the first token of a "
            "sequence can't be an action, because no token predicts it."
        )
