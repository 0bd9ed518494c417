# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a model's forward takes beside ids and mask, from bare tensors."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..data.columns import MediaError
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, prompt_position_ids
from ..families import TOKEN_FIELDS, family_of, modality_of
from ..forward.scoring import to_model
from .bare_media import check_media, split_media, token_fields


def bare_inputs(
    model: PreTrainedModel, sequences: torch.Tensor, media: dict[str, torch.Tensor], num_actions: int
) -> dict[str, torch.Tensor]:
    """
    Checks media against the ids and adds the per-token fields that the model needs. Positions are the model's own
    business.
    """
    own = {name: media[name] for name in TOKEN_FIELDS if name in media}
    media = {name: value for name, value in media.items() if name not in own}
    check_media(model, sequences, media)
    masks = [name for name in media if modality_of(name) == "audio" and name.endswith("mask")]
    if masks and family_of(model).apart is not None:
        parts = split_media(model, sequences, media)
        for name in masks:
            if len({int(part[name].flatten(1).sum(1).max()) for part in parts if name in part}) > 1:
                raise MediaError(
                    f"`{name}` has clips of different lengths, and this family's encoder would mix them with their "
                    "padding; pass rows with clips of one length at a time."
                )
    if not own:
        own = token_fields(model, sequences)
        videos = any(modality_of(name) == "video" for name in media)
        if "mm_token_type_ids" in own and videos and not (own["mm_token_type_ids"] == 2).any():
            raise MediaError(
                "this family writes videos with the token for images; pass the processor's `mm_token_type_ids`."
            )
        for name, fill in family_of(model).token_field_fill.items() if num_actions else ():
            own[name] = own[name].clone()
            own[name][:, -num_actions:] = fill
    return {**to_model(media, model, sequences.device), **own}


def bare_prompt(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    media: dict[str, torch.Tensor],
    fields: dict[str, torch.Tensor] | None = None,
) -> EncodedPrompt:
    """A prompt from bare tensors, on the CPU; per-token fields are told from the ids unless `fields` has them."""
    ids = input_ids.cpu()
    media = {name: value.cpu() for name, value in media.items()}
    fields = {name: value.cpu() for name, value in (fields or {}).items()} or token_fields(model, ids)
    positions = prompt_position_ids(model, ids, media, fields)
    return EncodedPrompt(ids, fields, media, positions, modalities=frozenset(map(modality_of, media)))


def packed_prompts(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    num_actions: int | list[int] | None,
    lengths: Sequence[int],
    media: dict[str, torch.Tensor],
) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor]:
    """
    Takes samples apart that lie one after the other in one row: their prompts, their completions padded on the right,
    `(B, A)`, and the mask of these.
    """
    lengths = list(map(int, lengths))
    if sequences.size(0) != 1 or sum(lengths) != sequences.size(1):
        raise ValueError(
            f"`packed_seq_lens` add up to {sum(lengths)}, but the sequences have the shape {tuple(sequences.shape)}."
        )
    if num_actions is None:
        raise ValueError("Packed sequences need `num_actions`, one number for each sample.")
    actions = [num_actions] * len(lengths) if isinstance(num_actions, int) else list(map(int, num_actions))
    if len(actions) != len(lengths):
        raise ValueError(f"There are {len(actions)} `num_actions` for {len(lengths)} packed samples.")
    for index, (n, length) in enumerate(zip(actions, lengths, strict=True)):
        check_num_actions(n, length, f" of sample {index}")
    rows = sequences[0].split(lengths)
    stops = [length - n for length, n in zip(lengths, actions, strict=True)]
    completions = [row[stop:] for row, stop in zip(rows, stops, strict=True)]
    placeholders = torch.tensor(sorted(all_placeholder_ids(model, model)), dtype=rows[0].dtype, device=rows[0].device)
    for index, ids in enumerate(completions):
        if torch.isin(ids, placeholders).any():
            raise MediaError(f"the actions of sample {index} hold media; pack prompts with all of their media.")
    fields = {name: media[name][0].split(lengths) for name in TOKEN_FIELDS if name in media}
    media = {name: value for name, value in media.items() if name not in fields}
    prompts = [
        bare_prompt(model, row[:stop], part, {name: values[index][:stop] for name, values in fields.items()})
        for index, (row, stop, part) in enumerate(zip(rows, stops, split_media(model, rows, media), strict=True))
    ]
    width = max(max(actions), 1)
    mask = torch.arange(width, device=sequences.device) < torch.tensor(actions, device=sequences.device)[:, None]
    completion_ids = sequences.new_zeros(mask.shape).masked_scatter(mask, torch.cat(completions))
    return prompts, completion_ids, mask


def check_num_actions(num_actions: int, length: int, whose: str = "") -> None:
    """Checks that each action has a token before it that could predict it."""
    if not 0 <= num_actions < length:
        raise ValueError(
            f"`num_actions`{whose} ({num_actions}) must be between 0 and {length - 1}: the first token has no token "
            "before it that could predict it."
        )
