# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Inputs of a model's forward from bare tensors: ids and media without their processor."""

import inspect
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from ...data.reading.refs import MediaError
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids, placeholder_token_ids, prompt_position_ids
from ...families import (
    AUDIO_FEATURES,
    AUDIO_MASKS,
    MODALITIES,
    TOKEN_FIELDS,
    TOKEN_FIELDS_WITH_ENDS,
    family_of,
    modality_of,
)
from ...forward.inputs import to_model


Rows = torch.Tensor | Sequence[torch.Tensor]

# Numbers of the modalities in per-token fields, as processors write them
_TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}


def bare_inputs(
    model: PreTrainedModel, sequences: torch.Tensor, media: dict[str, torch.Tensor], num_actions: int
) -> dict[str, torch.Tensor]:
    """
    Returns the media, checked against the ids, and the per-token fields. The model computes its positions itself.
    """
    fields = {name: media[name] for name in TOKEN_FIELDS if name in media}
    media = {name: value for name, value in media.items() if name not in fields}
    check_media(model, sequences, media)
    masks = [name for name in media if modality_of(name) == "audio" and name.endswith("mask")]
    if masks and family_of(model).isolate is not None:
        parts = split_media(model, sequences, media)
        for name in masks:
            if len({int(part[name].flatten(1).sum(1).max()) for part in parts if name in part}) > 1:
                raise MediaError(
                    f"`{name}` has clips of different lengths, which this family's encoder mixes with their padding; "
                    "pass rows with clips of one length at a time."
                )
    if not fields:
        fields = _checked_fields(model, sequences, media)
        for name, fill in family_of(model).token_field_fill.items() if num_actions else ():
            fields[name] = fields[name].clone()
            fields[name][:, -num_actions:] = fill
    return {**to_model(media, model, sequences.device), **fields}


def bare_prompt(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    media: dict[str, torch.Tensor],
    fields: dict[str, torch.Tensor] | None = None,
) -> EncodedPrompt:
    """Returns a prompt from bare tensors, on the CPU; without `fields`, per-token fields follow from the ids."""
    ids = input_ids.cpu()
    media = {name: value.cpu() for name, value in media.items()}
    check_media(model, [ids], media)
    fields = {name: value.cpu() for name, value in (fields or _checked_fields(model, ids, media)).items()}
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
    Splits samples packed into one row; returns their prompts, their completions padded on the right, `(B, A)`, and the
    mask of the completions.
    """
    lengths = list(map(int, lengths))
    if sequences.size(0) != 1 or sum(lengths) != sequences.size(1):
        raise ValueError(
            f"`packed_seq_lens` add up to {sum(lengths)}, but the sequences have the shape {tuple(sequences.shape)}."
        )
    if num_actions is None:
        raise ValueError("Packed sequences need `num_actions`, one number per sample.")
    actions = [num_actions] * len(lengths) if isinstance(num_actions, int) else list(map(int, num_actions))
    if len(actions) != len(lengths):
        raise ValueError(f"There are {len(actions)} `num_actions` for {len(lengths)} packed samples.")
    for index, (n, length) in enumerate(zip(actions, lengths, strict=True)):
        check_num_actions(n, length, f" of sample {index}")
    rows = sequences[0].split(lengths)
    stops = [length - n for length, n in zip(lengths, actions, strict=True)]
    completions = [row[stop:] for row, stop in zip(rows, stops, strict=True)]
    for index, is_placeholder in enumerate(_masks(completions, all_placeholder_ids(model, model))):
        if is_placeholder.any():
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


def padded_prompts(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, media: dict[str, torch.Tensor]
) -> list[EncodedPrompt] | None:
    """
    Returns prompts from left-padded ids `(B, P)` and their media; equal neighbors are one object. Returns `None` if
    features of media depend on the batch, or if it isn't clear which media belong to which row.
    """
    if family_of(model).isolate is not None:
        return None
    mask = attention_mask.bool()
    packed = {name: value[mask][None] if name in TOKEN_FIELDS else value for name, value in media.items()}
    try:
        prompts, _, _ = packed_prompts(model, input_ids[mask][None], 0, mask.sum(1).tolist(), packed)
    except MediaError:
        return None
    for i, (before, prompt) in enumerate(pairwise(prompts), 1):
        pairs = [({"ids": neighbor.input_ids} | neighbor.media) for neighbor in (before, prompt)]
        if pairs[0].keys() == pairs[1].keys() and all(
            torch.equal(pairs[0][n], value) for n, value in pairs[1].items()
        ):
            prompts[i] = prompts[i - 1]
    return prompts


def check_num_actions(num_actions: int, length: int, label: str = "") -> None:
    """Raises a `ValueError` unless each action has a token before it, which predicts the action."""
    if not 0 <= num_actions < length:
        raise ValueError(
            f"`num_actions`{label} ({num_actions}) must be between 0 and {length - 1}: no token predicts the first "
            "one."
        )


# Assignment of media to rows


def token_fields(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Returns a model's per-token fields, from its placeholders; videos with the image token count as images. Without
    these fields, models of the Qwen family silently give media the positions of text.
    """
    accepted = inspect.signature(type(model).forward).parameters
    types = torch.zeros_like(input_ids)
    if family_of(model).token_fields_mark_media:
        for modality, ids in placeholder_token_ids(model, model).items():
            types[torch.isin(input_ids, torch.tensor(sorted(ids), device=input_ids.device))] = _TOKEN_TYPES[modality]
    with_ends = types.clone()
    for modality in MODALITIES:
        for end in ("start", "end"):
            with_ends[input_ids == getattr(model.config, f"{modality}_{end}_token_id", -1)] = _TOKEN_TYPES[modality]
    names = [name for name in TOKEN_FIELDS if name in accepted]
    return {name: with_ends if name in TOKEN_FIELDS_WITH_ENDS else types for name in names}


def _checked_fields(
    model: PreTrainedModel, input_ids: torch.Tensor, media: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns [`token_fields`] of ids with media. Raises a [`MediaError`] if videos lack placeholders of their own."""
    fields = token_fields(model, input_ids)
    videos = any(modality_of(name) == "video" for name in media)
    if "mm_token_type_ids" in fields and videos and not (fields["mm_token_type_ids"] == 2).any():
        raise MediaError(
            "this family writes videos with the token for images; pass the processor's `mm_token_type_ids`."
        )
    return fields


def split_media(model: PreTrainedModel, rows: Rows, media: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the media of each row, as slices of the media of all rows, by the rows' placeholders."""
    check_media(model, rows, media)
    masks = {modality: _masks(rows, ids) for modality, ids in placeholder_token_ids(model, model).items()}
    if not any(mask.any() for mask in masks["video"]):
        masks["video"] = masks["image"]  # some families write videos with the image token
    result: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for modality in MODALITIES:
        tensors = {name: value for name, value in media.items() if modality_of(name) == modality}
        if not tensors:
            continue
        counts = _count_media(model, modality, masks[modality], tensors)
        grid = tensors.get(f"{modality}_grid_thw")
        patches = counts if grid is None else [int(part.prod(1).sum()) for part in grid.split(counts)]
        # Tensors have one entry per image, video or clip, per patch, or per row with media
        for name, value in tensors.items():
            options = (counts, patches, [min(count, 1) for count in counts])
            sizes = next((sizes for sizes in options if sum(sizes) == len(value)), None)
            if sizes is None:
                raise MediaError(
                    f"`{name}` has {len(value)} entries for {sum(counts)} {modality}s, so that it isn't clear which "
                    "belong to which row; pass the rows one by one."
                )
            for row, part in zip(result, value.split(sizes), strict=True):
                if len(part):
                    row[name] = part
    return result


def check_media(model: PreTrainedModel, rows: Rows, media: dict[str, torch.Tensor]) -> None:
    """
    Raises a [`MediaError`] if a batch's placeholders don't match its media, row by row where the tensors allow it.
    Models don't check this: most raise an error with too few features, but some silently run with too many or none.
    """
    masks = {modality: _masks(rows, ids) for modality, ids in placeholder_token_ids(model, model).items()}
    first = {
        name: next((i for i, mask in enumerate(row_masks) if mask.any()), None) for name, row_masks in masks.items()
    }
    # Grids, sizes and masks alone don't make a modality present
    present = {modality_of(name) for name, value in media.items() if value.is_floating_point() and value.dim() > 1}
    # Videos with the image token look like images
    as_images = "video" in present and first["video"] is None
    accepted = inspect.signature(type(model).forward).parameters
    audio_masks = accepted.keys() & set(AUDIO_MASKS) if family_of(model).has_frame_mask else set()
    for modality in MODALITIES:
        row, grid = first[modality], f"{modality}_grid_thw"
        if row is not None and modality not in present and not (modality == "image" and as_images):
            raise MediaError(f"row {row} holds placeholders for {modality} but there is no {modality}; pass it.")
        if modality in present and row is None and not (modality == "video" and first["image"] is not None):
            raise MediaError(
                f"there is {modality} but the sequences hold no placeholder for it, so that the model ignores it; "
                "make the ids with the model's processor."
            )
        if modality in present and grid in accepted and grid not in media:
            raise MediaError(f"there is {modality} but no `{grid}`; pass what the processor returns.")
        if modality == "audio" and "audio" in present and audio_masks and not audio_masks & media.keys():
            raise MediaError(f"there is audio but no `{min(audio_masks)}`; pass what the processor returns.")
    for modality in MODALITIES if not as_images else ("audio",):
        tensors = {name: value for name, value in media.items() if modality_of(name) == modality}
        if tensors and _token_counts(model, modality, tensors) is not None:
            _count_media(model, modality, masks[modality], tensors)


def audio_inputs(
    model: PreTrainedModel, values: torch.Tensor | None, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Returns features of clips and the mask of their frames, by the argument names of the model's forward."""
    accepted = inspect.signature(type(model).forward).parameters
    features = next((name for name in AUDIO_FEATURES if name in accepted), None)
    mask_name = next((name for name in AUDIO_MASKS if name in accepted), None)
    if values is not None and features is None:
        raise TypeError(f"{type(model).__name__} takes no audio.")
    if mask is not None and mask_name is None:
        raise TypeError(f"{type(model).__name__} takes no mask of audio.")
    if values is not None and mask is None and mask_name is not None and family_of(model).has_frame_mask:
        # Bands come before frames for Whisper's features, after them for others
        bands_first = hasattr(model.get_encoder(modality="audio").config, "num_mel_bins")
        mask = values.new_ones(len(values), values.size(2 if bands_first else 1), dtype=torch.bool)
    return {name: value for name, value in ((features, values), (mask_name, mask)) if name and value is not None}


def _masks(rows: Rows, ids: set[int]) -> list[torch.Tensor]:
    """Returns the mask of each row's tokens that are one of the ids, on the CPU."""
    return [torch.isin(row.cpu(), torch.tensor(sorted(ids), dtype=row.dtype)) for row in rows]


def _token_counts(model: PreTrainedModel, modality: str, tensors: dict[str, torch.Tensor]) -> list[int] | None:
    """Returns the number of tokens of each image, video or clip, or `None` if the tensors don't give it."""
    grid = next((value for name, value in tensors.items() if name.endswith("grid_thw")), None)
    if grid is not None:
        return (grid.prod(1) // model.config.vision_config.spatial_merge_size**2).tolist()
    if "audio_embed_sizes" in tensors:
        return tensors["audio_embed_sizes"].tolist()
    mask = next((tensors[name] for name in ("feature_attention_mask", "input_features_mask") if name in tensors), None)
    if modality != "audio" or mask is None:
        return None
    lengths = mask.sum(1).long()
    if (rule := family_of(model).audio_tokens) is not None:
        return rule(model, lengths).tolist()
    whisper_rule = getattr(model.get_encoder(modality="audio"), "_get_feat_extract_output_lengths", None)
    return None if whisper_rule is None else whisper_rule(lengths)[1].tolist()


def _count_media(
    model: PreTrainedModel, modality: str, masks: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> list[int]:
    sizes = _token_counts(model, modality, tensors)
    if sizes is not None:
        counts, used = [], 0
        for row, mask in enumerate(masks):
            missing, count = int(mask.sum()), 0
            while missing > 0 and used + count < len(sizes):
                missing -= sizes[used + count]
                count += 1
            if missing != 0:
                whole = ", and pass its mask of frames as `audio_attention_mask`" if modality == "audio" else ""
                raise MediaError(
                    f"row {row} holds {int(mask.sum())} placeholders for {modality}, which its {modality}s don't add "
                    f"up to ({sizes[used : used + count]} tokens); make ids and {modality}s with the same processor "
                    f"call{whole}."
                )
            counts.append(count)
            used += count
        if used < len(sizes):
            raise MediaError(f"{len(sizes) - used} {modality}s have no placeholder in any row.")
        return counts
    # Without numbers of tokens, a run of adjacent placeholders is one image, video or clip, or each row with
    # placeholders has one, or all take equally many tokens
    n_media = max(len(value) for value in tensors.values())
    runs = [int((mask[1:] & ~mask[:-1]).sum() + mask[0]) for mask in masks]
    with_some = [int(mask.any()) for mask in masks]
    tokens = [int(mask.sum()) for mask in masks]
    size = max(sum(tokens) // n_media, 1)
    for counts in (runs, with_some, [n // size for n in tokens] if not any(n % size for n in tokens) else []):
        if sum(counts) == n_media:
            return counts
    raise MediaError(
        f"the rows hold {sum(runs)} runs of placeholders for {modality}, but there are {n_media} of it, so that it "
        "isn't clear which belong to which row; pass the rows one by one."
    )
