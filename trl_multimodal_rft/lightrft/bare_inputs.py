# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a model's forward takes beside ids and mask, from bare tensors."""

import torch
from transformers import PreTrainedModel

from ..data.columns import MediaError
from ..encoding.prompts import EncodedPrompt, prompt_position_ids
from ..families import TOKEN_FIELDS, family_of, modality_of
from ..forward.scoring import to_model
from .bare_media import check_media, split_media, token_fields


def bare_inputs(
    model: PreTrainedModel, sequences: torch.Tensor, media: dict[str, torch.Tensor], num_actions: int
) -> dict[str, torch.Tensor]:
    """
    Checks media against the ids and adds the per-token fields that the model needs. Positions are the model's own business.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.
        sequences (`torch.Tensor`):
            Prompts and completions, shape `(B, S)`.
        media (`dict[str, torch.Tensor]`):
            Media of all sequences, and per-token fields if they are known.
        num_actions (`int`):
            Number of action tokens, the last ones.

    Returns:
        `dict[str, torch.Tensor]`: Media on the device and in the dtype of the forward, and per-token fields.

    Raises:
        [`MediaError`]: If placeholders and media don't agree, if clips would be mixed with their padding, or if the
            fields can't be told from the ids.
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
    """
    A prompt from bare tensors, on the CPU.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model without wrappers.
        input_ids (`torch.Tensor`):
            Ids of the prompt, shape `(P,)`.
        media (`dict[str, torch.Tensor]`):
            Its media by the names of the model's forward.
        fields (`dict[str, torch.Tensor]`, *optional*):
            Per-token fields, each of shape `(P,)`. By default they are told from the ids.

    Returns:
        [`EncodedPrompt`]: The prompt.
    """
    ids = input_ids.cpu()
    media = {name: value.cpu() for name, value in media.items()}
    fields = {name: value.cpu() for name, value in (fields or {}).items()} or token_fields(model, ids)
    positions = prompt_position_ids(model, ids, media, fields)
    return EncodedPrompt(ids, fields, media, positions, modalities=frozenset(map(modality_of, media)))
