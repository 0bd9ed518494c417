# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversion of bare inputs (token ids and media tensors) to prompts and completions, without a processor."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...data.reading.refs import MediaError
from ...encoding.join import padded, same_prompt
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids, placeholder_token_ids, prompt_position_ids
from ...families import AUDIO_FEATURES, AUDIO_MASKS, TOKEN_FIELDS, TOKEN_FIELDS_WITH_ENDS, family_of, modality_of
from ...forward.scores import ScoreRequest
from ...modalities import MODALITIES
from .completions import check_num_actions, packed_rows


Rows = torch.Tensor | Sequence[torch.Tensor]  # ids, padded or one tensor per row

# Names of media tensors in experiences by argument names of models. Other tensors have one name for both.
MEDIA_FIELDS = {
    "image_grid_thw": "image_grid_thws",
    "video_grid_thw": "video_grid_thws",
    **dict.fromkeys(AUDIO_FEATURES, "audio_values"),
    **dict.fromkeys(AUDIO_MASKS, "audio_attention_mask"),
}

# Codes of the modalities in token fields such as `mm_token_type_ids`, as processors write them. Text has the code 0.
_TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}


def on_action_columns(values: torch.Tensor, mask: torch.Tensor, is_action: torch.Tensor) -> torch.Tensor:
    """
    Moves values of completion tokens `(B, C)` to the action columns of a caller's batch, `(B, A)` or, for packed
    samples, `(1, sum of A)`. Columns where `is_action` is false are 0.
    """
    return values.new_zeros(is_action.shape).masked_scatter(is_action, values[mask.bool()])


def padded_completions(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor | None,
    num_actions: int,
    media: dict[str, torch.Tensor],
) -> tuple[ScoreRequest, torch.Tensor]:
    """
    Returns the prompts and completions of padded sequences `(B, S)`, and whether action columns hold tokens of
    completions, `(B, A)`. Completions are the tokens in the last `num_actions` columns. Two kinds of tokens in these
    columns still belong to the prompt: a sequence's first token, since no token predicts it, and all tokens up to and
    including the first text token after media.

    Example: with `num_actions=2`, the rows `[p, q, a, b]` and `[0, 0, r, c]` have the completions `[a, b]` and `[c]`,
    and the action columns `[[True, True], [False, True]]`.
    """
    width = sequences.size(1)
    check_num_actions(num_actions, width)
    mask = torch.ones_like(sequences, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    # Columns up to a row's last placeholder
    up_to_media = _isin(sequences, all_placeholder_ids(model, model)).flip(1).cumsum(1).flip(1) > 0
    # The first text token after media stays in the prompt: packed rows repeat a prompt's last token, and can repeat
    # only text
    after_media = ~F.pad(up_to_media, (1, 0))[:, :-1]
    is_action = (mask & after_media & (mask.cumsum(1) > 1))[:, width - num_actions :]
    # Without their padding, the rows are packed samples
    unpadded_media = {name: value[mask][None] if name in TOKEN_FIELDS else value for name, value in media.items()}
    n_actions = is_action.sum(1).tolist()
    lengths = mask.sum(1).tolist()
    request, _ = unpadded_completions(model, sequences[mask][None], n_actions, lengths, unpadded_media)
    return request, is_action


def unpadded_completions(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    num_actions: int | Sequence[int] | None,
    lengths: Sequence[int],
    media: dict[str, torch.Tensor],
) -> tuple[ScoreRequest, torch.Tensor]:
    """
    Returns the prompts and completions of packed samples `(1, sum of S)`, see [`packed_rows`], and ones for all of
    their actions, `(1, sum of A)`. The samples `[p, q, a, b]` and `[r, c]`, whose actions begin at 2 and 1, have the
    prompts `[p, q]` and `[r]`, and the completions `[a, b]` and `[c]`.
    """
    rows, starts = packed_rows(sequences, num_actions, list(map(int, lengths)))
    completions = [row[start:] for row, start in zip(rows, starts, strict=True)]
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if start < len(row) and _isin(row[start - 1 :], all_placeholder_ids(model, model)).any():
            raise MediaError(
                f"the actions of sample {index} hold media, or follow them directly; pack prompts with all of their "
                "media, and at least one text token after them."
            )
    fields = {name: media[name][0].split([*map(len, rows)]) for name in TOKEN_FIELDS if name in media}
    media_by_row = split_media(model, rows, {name: value for name, value in media.items() if name not in fields})
    _check_clips(model, media_by_row)
    prompt_ids = [row[:start] for row, start in zip(rows, starts, strict=True)]
    prompt_fields = [
        {name: values[index][:start] for name, values in fields.items()} for index, start in enumerate(starts)
    ]
    ids, mask = padded(completions)
    prompts = bare_prompts(model, zip(prompt_ids, media_by_row, prompt_fields, strict=True))
    is_action = torch.ones(1, sum(map(len, completions)), dtype=torch.bool, device=ids.device)
    return ScoreRequest(prompts, ids, mask), is_action


def bare_prompts(
    model: PreTrainedModel,
    inputs: Iterable[tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor] | None]],
) -> list[EncodedPrompt]:
    """
    Returns one prompt per tuple of ids, media and token fields. Tuples with equal ids and media get the same object,
    so that forwards share the prompt.
    """
    prompts: list[EncodedPrompt] = []
    prompts_by_ids: defaultdict[tuple[int, ...], list[EncodedPrompt]] = defaultdict(list)
    for ids, media, fields in inputs:
        media = {name: value.cpu() for name, value in media.items()}
        candidates = prompts_by_ids[tuple(ids.tolist())]
        prompt = next((candidate for candidate in candidates if same_prompt(candidate.media, media)), None)
        if prompt is None:
            prompt = bare_prompt(model, ids, media, fields)
            candidates.append(prompt)
        prompts.append(prompt)
    return prompts


def bare_prompt(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    media: dict[str, torch.Tensor],
    fields: dict[str, torch.Tensor] | None = None,
) -> EncodedPrompt:
    """
    Returns a prompt on the CPU from token ids and media. Without `fields`, token fields are derived from the ids.
    Raises a [`MediaError`] if placeholders and media don't match, or if fields can't be derived because videos have
    the placeholders of images.
    """
    ids = input_ids.cpu()
    media = {name: value.cpu() for name, value in media.items()}
    split_media(model, [ids], media)  # only checks
    if not fields:
        fields = token_fields(model, ids)
        has_video = any(modality_of(name) == "video" for name in media)
        if "mm_token_type_ids" in fields and has_video and not (fields["mm_token_type_ids"] == 2).any():
            raise MediaError(
                "this family writes videos with the token for images; pass the processor's `mm_token_type_ids`."
            )
    fields = {name: value.cpu() for name, value in fields.items()}
    positions = prompt_position_ids(model, ids, media, fields)
    return EncodedPrompt(ids, fields, media, positions, modalities=frozenset(map(modality_of, media)))


def token_fields(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Derives the model's token fields from placeholders in the ids, such as `[0, 1, 1, 0]` for two image placeholders
    within text. Videos with placeholders of images count as images. Without token fields, models of the Qwen family
    silently give media the positions of text.
    """
    accepted = inspect.signature(type(model).forward).parameters
    types = torch.zeros_like(input_ids)
    if family_of(model).token_fields_mark_media:
        for modality, ids in placeholder_token_ids(model, model).items():
            types[_isin(input_ids, ids)] = _TOKEN_TYPES[modality]
    # Types that also mark the tokens before and after media. For a model without such tokens, -1 matches no token.
    with_ends = types.clone()
    for modality in MODALITIES:
        for end in ("start", "end"):
            with_ends[input_ids == getattr(model.config, f"{modality}_{end}_token_id", -1)] = _TOKEN_TYPES[modality]
    names = [name for name in TOKEN_FIELDS if name in accepted]
    return {name: with_ends if name in TOKEN_FIELDS_WITH_ENDS else types for name in names}


def media_names(model: PreTrainedModel) -> dict[str, str]:
    """Returns argument names of the model's forward, by names in experiences, for tensors with two names."""
    accepted = inspect.signature(type(model).forward).parameters
    return {field: name for name, field in MEDIA_FIELDS.items() if name in accepted}


def audio_inputs(
    model: PreTrainedModel, ids: torch.Tensor, values: torch.Tensor | None, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """
    Returns features and masks of audio clips, by the argument names of the model's forward. Without a mask, all frames
    count, or as many as the placeholders in `ids` say, if they fit only one number.
    """
    names = media_names(model)
    if values is not None and "audio_values" not in names:
        raise TypeError(f"{type(model).__name__} takes no audio.")
    if mask is not None and "audio_attention_mask" not in names:
        raise TypeError(f"{type(model).__name__} takes no mask of audio.")
    if values is not None and mask is None and "audio_attention_mask" in names:
        mask = _mask_by_placeholders(model, ids, values)
    inputs = {"audio_values": values, "audio_attention_mask": mask}
    return {names[field]: value for field, value in inputs.items() if value is not None}


def _mask_by_placeholders(model: PreTrainedModel, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Returns a mask of clips without one, see [`audio_inputs`], or `None` if the family needs none."""
    family = family_of(model)
    # Features of Whisper have the shape (clips, mel bands, frames), other features (clips, frames, bands)
    bands_first = hasattr(model.get_encoder(modality="audio").config, "num_mel_bins")
    n_frames = values.size(2 if bands_first else 1)
    all_frames = values.new_ones(len(values), n_frames, dtype=torch.bool) if family.has_frame_mask else None
    is_audio = _isin(ids, placeholder_token_ids(model, model)["audio"]).cpu()
    runs = F.pad(is_audio, (1, 1)).int().diff(dim=1)
    # Rows and columns where runs of placeholders begin and end, in order: one run per clip
    n_tokens = (runs == -1).nonzero()[:, 1] - (runs == 1).nonzero()[:, 1]
    lengths = torch.arange(1, max(n_frames, int(is_audio.sum())) + 1)
    rule = _tokens_of_frames(model, lengths)
    if rule is None or len(n_tokens) != len(values) or (all_frames is None and len(n_tokens.unique()) == 1):
        return all_frames
    if all_frames is not None:
        lengths = lengths[:n_frames]
        rule = rule[:n_frames]
        if (rule[-1] == n_tokens).all():
            return all_frames
    fits = rule[None] == n_tokens[:, None]  # (clips, lengths)
    if (fits.sum(1) != 1).any():
        return all_frames  # the check of placeholders raises an error where they don't fit
    counts = lengths[fits.int().argmax(1)]
    width = n_frames if all_frames is not None else int(counts.max())
    return (torch.arange(width) < counts[:, None]).to(values.device)


# Assignment of media to rows


def split_media(model: PreTrainedModel, rows: Rows, media: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """
    Splits the media tensors of a batch among its rows, by the placeholders of each row.

    Example: three images have 4, 2 and 6 tokens. A row with 4 placeholders gets the first image, the next row, with 8
    placeholders, gets the other two. Raises a [`MediaError`] if the placeholders don't match the media, since some
    models run with too many or too few placeholders without an error.
    """
    # By modality: where each row has placeholders, and the media tensors
    masks = {
        modality: [_isin(row.cpu(), ids) for row in rows]
        for modality, ids in placeholder_token_ids(model, model).items()
    }
    tensors = {
        modality: {name: value for name, value in media.items() if modality_of(name) == modality}
        for modality in MODALITIES
    }
    videos_as_images = _check_modalities(model, masks, tensors)
    if not any(mask.any() for mask in masks["video"]):
        masks["video"] = masks["image"]  # some families write videos with the image token
    result: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for modality, features in tensors.items():
        if not features:
            continue
        if len(rows) == 1:  # the row gets all media, and only their number of tokens is checked
            # With videos as images, the placeholders of both can't be told apart, so neither is counted
            is_counted = modality == "audio" or not videos_as_images
            if is_counted and _token_counts(model, modality, features) is not None:
                _count_media(model, modality, masks[modality], features)
            result[0] |= features
            continue
        counts = _count_media(model, modality, masks[modality], features)
        grid = features.get(f"{modality}_grid_thw")
        patch_counts = counts if grid is None else [int(part.prod(1).sum()) for part in grid.split(counts)]
        # A tensor has one entry per image, video or clip, one per patch, or one per row with media. Its length tells
        # which of them
        for name, value in features.items():
            candidates = (counts, patch_counts, [min(count, 1) for count in counts])
            sizes = next((row_sizes for row_sizes in candidates if sum(row_sizes) == len(value)), None)
            if sizes is None:
                raise MediaError(
                    f"`{name}` has {len(value)} entries for {sum(counts)} {modality}s, so that it isn't clear which "
                    "belong to which row; pass the rows one by one."
                )
            for row, part in zip(result, value.split(sizes), strict=True):
                if len(part):
                    row[name] = part
    return result


def _check_modalities(
    model: PreTrainedModel, masks: dict[str, list[torch.Tensor]], tensors: dict[str, dict[str, torch.Tensor]]
) -> bool:
    """
    Returns whether videos have image placeholders. Raises a [`MediaError`] if a modality has media without
    placeholders, placeholders without media, or media without their grid or mask.
    """
    # By modality, the first row with placeholders, or `None`
    first_row_indices = {
        modality: next((i for i, mask in enumerate(row_masks) if mask.any()), None)
        for modality, row_masks in masks.items()
    }
    # Grids, sizes and masks alone don't make a modality present
    present_modalities = {
        modality
        for modality, features in tensors.items()
        if any(value.is_floating_point() and value.dim() > 1 for value in features.values())
    }
    videos_as_images = "video" in present_modalities and first_row_indices["video"] is None
    accepted = inspect.signature(type(model).forward).parameters
    audio_masks = accepted.keys() & set(AUDIO_MASKS) if family_of(model).has_frame_mask else set()
    for modality, features in tensors.items():
        row_index = first_row_indices[modality]
        grid = f"{modality}_grid_thw"
        if (
            row_index is not None
            and modality not in present_modalities
            and not (modality == "image" and videos_as_images)
        ):
            raise MediaError(
                f"row {row_index} holds placeholders for {modality}, but there is no {modality}; pass the {modality}."
            )
        if modality not in present_modalities:
            continue
        if row_index is None and not (modality == "video" and first_row_indices["image"] is not None):
            raise MediaError(
                f"there is {modality}, but the sequences hold no placeholder for it, so the model would ignore the "
                f"{modality}; make the ids with the model's processor."
            )
        if grid in accepted and grid not in features:
            raise MediaError(f"there is {modality} but no `{grid}`; pass the processor's `{grid}`.")
        if modality == "audio" and audio_masks and not audio_masks & features.keys():
            raise MediaError(f"there is audio but no `{min(audio_masks)}`; pass the processor's mask.")
    return videos_as_images


def _check_clips(model: PreTrainedModel, rows: Sequence[dict[str, torch.Tensor]]) -> None:
    """
    Raises a [`MediaError`] if the longest clips of rows differ in length, and the family's prompts are encoded in
    isolation, as its encoder may mix clips with their padding.
    """
    if family_of(model).isolate is None:
        return
    names = set().union(*rows)
    for name in sorted(name for name in names if modality_of(name) == "audio" and name.endswith("mask")):
        if len({int(row[name].flatten(1).sum(1).max()) for row in rows if name in row}) > 1:
            raise MediaError(
                f"`{name}` has clips of different lengths, which this family's encoder mixes with their padding; "
                "pass rows with clips of one length at a time."
            )


def _isin(ids: torch.Tensor, tokens: set[int]) -> torch.Tensor:
    return torch.isin(ids, torch.tensor(sorted(tokens), dtype=ids.dtype, device=ids.device))


def _token_counts(model: PreTrainedModel, modality: str, tensors: dict[str, torch.Tensor]) -> list[int] | None:
    """Returns the number of tokens of each image, video or clip, or `None` if the tensors don't determine it."""
    grid = next((value for name, value in tensors.items() if name.endswith("grid_thw")), None)
    if grid is not None:
        return (grid.prod(1) // model.config.vision_config.spatial_merge_size**2).tolist()
    if "audio_embed_sizes" in tensors:
        return tensors["audio_embed_sizes"].tolist()
    mask = next((tensors[name] for name in ("feature_attention_mask", "input_features_mask") if name in tensors), None)
    if modality != "audio" or mask is None:
        return None
    counts = _tokens_of_frames(model, mask.sum(1).long())
    return None if counts is None else counts.tolist()


def _tokens_of_frames(model: PreTrainedModel, lengths: torch.Tensor) -> torch.Tensor | None:
    """Returns the number of tokens of clips by their number of frames, or `None` if no rule is known."""
    family_rule = family_of(model).audio_tokens
    if family_rule is not None:
        return family_rule(model, lengths)
    whisper_rule = getattr(model.get_encoder(modality="audio"), "_get_feat_extract_output_lengths", None)
    # The rule returns the lengths after the convolutions, and the lengths of the encoder's output
    return None if whisper_rule is None else whisper_rule(lengths)[1]


def _count_media(
    model: PreTrainedModel, modality: str, masks: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> list[int]:
    """
    Returns the number of images, videos or clips of each row, from the masks of the rows' placeholders. For example,
    rows with 4 and 8 placeholders have 1 and 2 of three images with 4, 2 and 6 tokens.
    """
    token_counts = _token_counts(model, modality, tensors)
    if token_counts is not None:
        counts = []
        n_used = 0
        for row, mask in enumerate(masks):
            remaining = int(mask.sum())
            count = 0
            while remaining > 0 and n_used + count < len(token_counts):
                remaining -= token_counts[n_used + count]
                count += 1
            if remaining != 0:
                hint = ", and pass its mask of frames as `audio_attention_mask`" if modality == "audio" else ""
                raise MediaError(
                    f"row {row} holds {int(mask.sum())} placeholders for {modality}, and its {modality}s have "
                    f"{token_counts[n_used : n_used + count]} tokens, which don't add up to this number; make ids and "
                    f"{modality}s with the same processor call{hint}."
                )
            counts.append(count)
            n_used += count
        if n_used < len(token_counts):
            raise MediaError(
                f"{len(token_counts) - n_used} {modality}s have no placeholder in any row; make ids and "
                f"{modality}s with the same processor call."
            )
        return counts
    # Token counts are unknown. The result is the first of three guesses that adds up to `n_media`: one image, video or
    # clip per run of placeholders, one per row with placeholders, or one per equal number of placeholders
    n_media = max(len(value) for value in tensors.values())
    n_runs = [int((mask[1:] & ~mask[:-1]).sum() + mask[0]) for mask in masks]
    one_per_row = [int(mask.any()) for mask in masks]
    n_placeholders = [int(mask.sum()) for mask in masks]
    tokens_per_item = max(sum(n_placeholders) // n_media, 1)
    for counts in (
        n_runs,
        one_per_row,
        [n // tokens_per_item for n in n_placeholders] if not any(n % tokens_per_item for n in n_placeholders) else [],
    ):
        if sum(counts) == n_media:
            return counts
    raise MediaError(
        f"the rows hold {sum(n_runs)} runs of placeholders for {modality}, but there are {n_media} {modality}s, so "
        "that it isn't clear which belong to which row; pass the rows one by one."
    )
