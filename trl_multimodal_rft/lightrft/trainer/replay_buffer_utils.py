# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Functions that split experiences into samples, and join samples to experiences again, with their media."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import PIL.Image
import torch
from accelerate.utils import recursively_apply

from ...encoding.media import join_tensors
from ...families import indexed_media
from .experience import Experience, ExperienceVL, MediaFields, Record, VisionFields, zero_pad_sequences


@dataclass(eq=False)
class BufferItem(Record[torch.Tensor]):
    """
    One sample of an experience. A field is a row of the batch's field, see [`Experience`], of shape `(S,)` or `(A,)`.
    The last `A` columns of `sequences` are the action columns. `values`, `returns` and `advantages` may also have one
    number for all actions, shape `(1,)`.
    """

    action_entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None

    @property
    def n_actions(self) -> int:
        """Number of action columns."""
        names = sorted(_ACTION_FIELDS, key=_ONE_NUMBER_FIELDS.__contains__)  # fields with a number per action first
        values = (getattr(self, name) for name in names)
        return next((value.numel() for value in values if value is not None), 0)

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Ids before the action columns."""
        return self.sequences[: len(self.sequences) - self.n_actions]

    @property
    def reward(self) -> float:
        """The reward, `NaN` if there is none."""
        return float((self.info or {}).get("reward", math.nan))

    @property
    def is_scorable(self) -> bool:
        """Whether the reward isn't `NaN`. A sample without a reward counts as scorable."""
        return "reward" not in (self.info or {}) or not math.isnan(self.reward)


@dataclass(eq=False)
class BufferItemVL(MediaFields, BufferItem, VisionFields[torch.Tensor]):
    """One sample of a batch with media, see [`ExperienceVL`]. Media that the sample lacks are `None`."""


# Fields of shape `(S,)`, and fields of shape `(A,)`
_SEQUENCE_FIELDS = ("sequences", "attention_mask")
_ACTION_FIELDS = tuple(spec.name for spec in fields(BufferItem) if spec.name not in (*_SEQUENCE_FIELDS, "info"))

# Fields of shape `(A,)` that may have one number for all actions instead
_ONE_NUMBER_FIELDS = ("values", "returns", "advantages")

# Media tensors by modality. A grid has one row per image or video, and comes first: the tensor after the grid has one
# row per patch. Without a grid, rows depend on the model.
_MEDIA = {
    "image": ("image_grid_thws", "pixel_values"),
    "video": ("video_grid_thws", "pixel_values_videos"),
    "audio": ("audio_values", "audio_attention_mask"),
}


def is_vl_experience(experience: Record) -> bool:
    """Returns whether an experience, or a sample of an experience, is of the type that holds media."""
    return isinstance(experience, (ExperienceVL, BufferItemVL))


@torch.no_grad()
def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """
    Splits an experience into samples.

    `media_rows` holds, for each media tensor, the number of rows of each sample. Without it, `image_num`, `video_num`
    and `audio_num` in `info` hold each sample's number of images, videos and clips, by default 1. A grid then has one
    row per image or video, a tensor with a grid one row per patch, and other tensors one row per image, video or clip.

    Args:
        experience ([`Experience`]):
            The batch, padded or packed.

    Returns:
        `list[BufferItem]`: The samples, which are [`BufferItemVL`]s for an [`ExperienceVL`]. They share no memory with
        the batch. Equal media of adjacent samples, for example in a group, are one tensor.

    Raises:
        `ValueError`: If fields don't match, or if it isn't clear which rows of a media tensor belong to a sample.
    """
    size = len(experience.sequences)
    entries: dict[str, Any] = {name: _rows(experience, name, size) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    entries["info"] = _split_info(experience.info, size)
    item_type = BufferItem
    if isinstance(experience, ExperienceVL):
        item_type = BufferItemVL
        entries["raw_images"] = _raw_images(experience.raw_images, size)
    items = [item_type(**{name: values[i] for name, values in entries.items()}) for i in range(size)]
    for index, item in enumerate(items):
        _check_lengths(item, index)
    if not items:
        return items
    media = media_tensors(experience)
    parts_by_name = {name: media[name].split(rows) for name, rows in _media_rows(experience, media).items()}
    for name, parts in parts_by_name.items():
        # Indices into another tensor count from the first sample's entries in a batch, see `join_tensors`
        indexed = parts_by_name.get(indexed_media(name) or "", ())
        starts = accumulate([0, *(part.shape[:-1].numel() for part in indexed)]) if indexed else [0] * size
        for item, part, start in zip(items, parts, starts, strict=False):
            if len(part):
                set_media(item, name, torch.where(part < 0, part, part - start) if start else part.clone())
    share_media(items)
    return items


def unpadded_items(experience: Experience, pad_token_id: int | None = None) -> list[BufferItem]:
    """Splits a padded or packed experience into samples without padding, see [`remove_padding_in_sequences`]."""
    items = split_experience_batch(experience)
    return items if isinstance(experience.sequences, list) else remove_padding_in_sequences(items, pad_token_id)


@torch.no_grad()
def make_experience_batch(
    items: Sequence[BufferItem], packing_samples: bool = False, pad_token_id: int = 0
) -> Experience:
    """
    Joins samples to a batch.

    `sequences` and fields of actions are padded on the left, so that the last columns of `sequences` are the action
    columns of every row. Media are concatenated in order, after trailing dimensions are padded on the right.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, of any mixture of types.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether to return lists of tensors without padding.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Id of padding in `sequences`.

    Returns:
        [`Experience`]: The batch, an [`ExperienceVL`] if any item is a [`BufferItemVL`]. A field that is `None` in all
        items stays `None`, but padding adds masks. A value of `info` has one entry per sample. It is a tensor if all
        entries are tensors of one shape and dtype, else a list, with `None` for samples without the key.

    Raises:
        `ValueError`: If there are no items, or if only some of them have a field.
    """
    if not items:
        raise ValueError("There are no items to batch.")
    for index, item in enumerate(items):
        _check_lengths(item, index)
    batch_fields: dict[str, Any] = {name: column(items, name) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    if packing_samples:
        batch_fields = recursively_apply(torch.clone, batch_fields)
    else:
        if len({len(item.sequences) for item in items}) > 1 and batch_fields["attention_mask"] is None:
            batch_fields["attention_mask"] = [torch.ones_like(item.sequences) for item in items]
        if len({item.n_actions for item in items}) > 1 and batch_fields["action_mask"] is None:
            batch_fields["action_mask"] = [item.sequences.new_ones(item.n_actions, dtype=torch.bool) for item in items]
        batch_fields = {
            name: values and zero_pad_sequences(values, value=pad_token_id if name == "sequences" else 0)
            for name, values in batch_fields.items()
        }
    batch_fields["info"] = _join_info([item.info for item in items])
    if not any(isinstance(item, BufferItemVL) for item in items):
        return Experience(**batch_fields)

    batch = ExperienceVL(**batch_fields)
    join_media_of([*map(media_tensors, items)], [getattr(item, "raw_images", None) for item in items], batch)
    return batch


@torch.no_grad()
def remove_padding_in_sequences(items: Sequence[BufferItem], pad_token_id: int | None = None) -> list[BufferItem]:
    """
    Cuts samples to the span from the first to the last 1 of their attention mask. For example, `[0, p, a, b, 0]` with
    three action columns becomes `[p, a, b]` with two.

    Action columns after the end of a sequence are removed. Action columns before the first action become part of the
    prompt. Columns between the two stay, even if they are masked. Without any action, all action columns within the
    sequence stay.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, which stay unchanged.
        pad_token_id (`int`, *optional*):
            For samples without an attention mask, the id that counts as padding, except where the action mask is 1.

    Returns:
        `list[BufferItem]`: New samples; their tensors share no memory with the old ones.

    Raises:
        `ValueError`: If a sample has no token, or if it has no attention mask and `pad_token_id` is `None`.
    """
    return [_remove_padding(item, index, pad_token_id) for index, item in enumerate(items)]


def _remove_padding(item: BufferItem, index: int, pad_token_id: int | None) -> BufferItem:
    """Cuts one sample, see [`remove_padding_in_sequences`]. `index` names the sample in errors."""
    _check_lengths(item, index)
    length = len(item.sequences)
    n_actions = item.n_actions
    if item.attention_mask is not None:
        is_token = item.attention_mask.bool()
    elif pad_token_id is not None:
        is_token = item.sequences != pad_token_id
        if item.action_mask is not None:
            is_token[length - n_actions :] |= item.action_mask.bool()
    else:
        raise ValueError(f"Item {index} has no `attention_mask` that shows its padding; pass `pad_token_id`.")
    tokens = is_token.nonzero()
    if len(tokens) == 0:
        raise ValueError(f"Item {index} has no token: its sequence is all padding. Drop it.")
    start = int(tokens[0])
    end = int(tokens[-1]) + 1

    # Action columns from `action_start` to `action_end - 1` stay. Both count from the sample's first action column.
    action_end = max(n_actions - (length - end), 0)
    action_start = max(action_end - (end - start), 0)
    if item.action_mask is not None:
        actions = item.action_mask[:action_end].nonzero()
        action_start = max(action_start, int(actions[0])) if len(actions) else action_start
    changes: dict[str, Any] = {}
    for names, span in ((_SEQUENCE_FIELDS, slice(start, end)), (_ACTION_FIELDS, slice(action_start, action_end))):
        for name in names:
            value = getattr(item, name)
            if value is not None:
                changes[name] = value.clone() if _has_one_number(item, name) else value[span].clone()
    return replace(item, **changes)


def _has_one_number(item: BufferItem, name: str) -> bool:
    """Returns whether a field has one number for all of several actions, or of none."""
    value = getattr(item, name)
    return name in _ONE_NUMBER_FIELDS and value is not None and value.shape == (1,) and item.n_actions != 1


def _check_lengths(item: BufferItem, index: int) -> None:
    if item.sequences.dim() != 1:
        raise ValueError(f"`sequences` of item {index} has shape {tuple(item.sequences.shape)}, not (S,).")
    n_tokens = len(item.sequences)
    n_actions = item.n_actions
    for name in ("attention_mask", *_ACTION_FIELDS):
        value = getattr(item, name)
        length = n_tokens if name == "attention_mask" else n_actions
        if value is not None and value.shape != (length,) and not _has_one_number(item, name):
            raise ValueError(
                f"`{name}` of item {index} has shape {tuple(value.shape)}, but ({length},) fits its other fields."
            )
    if n_actions > n_tokens:
        raise ValueError(f"Item {index} has {n_actions} action columns, but only {n_tokens} tokens.")


# Fields


def _rows(experience: Experience, name: str, size: int) -> list[torch.Tensor | None]:
    """Returns copies of the rows of a field, one per sample, or `None` for each sample if the field is `None`."""
    value = getattr(experience, name)
    if value is None:
        return [None] * size
    if len(value) != size:
        raise ValueError(f"`{name}` has {len(value)} rows, but there are {size} samples.")
    return [row.clone() for row in value]


def column(items: Sequence[BufferItem], name: str) -> list[torch.Tensor] | None:
    """
    Returns a field of all samples, or `None` if no sample has the field. Raises a `ValueError` if only some have it.
    """
    rows = [getattr(item, name) for item in items]
    missing = [index for index, row in enumerate(rows) if row is None]
    if len(missing) == len(items):
        return None
    if missing:
        raise ValueError(
            f"`{name}` is None in item {missing[0]}, but not in all items; pass it for all items, or for none."
        )
    has_one = [_has_one_number(item, name) for item in items]
    if any(has_one) and any(item.n_actions != 1 and not one for item, one in zip(items, has_one, strict=True)):
        raise ValueError(
            f"`{name}` of item {has_one.index(True)} has one number, but that of others one per action; pass the same "
            "form for all items."
        )
    return rows


def _raw_images(raw_images: list | None, size: int) -> list[list[PIL.Image.Image] | None]:
    if raw_images is None:
        return [None] * size
    if len(raw_images) != size:
        raise ValueError(
            f"`raw_images` has {len(raw_images)} entries for {size} samples; pass one list of images per sample."
        )
    return [[images] if isinstance(images, PIL.Image.Image) else images for images in raw_images]


def _split_info(value: Any, size: int) -> list:
    """Splits `info`, or a value in `info`, by samples. A value of the whole batch is repeated for every sample."""
    if isinstance(value, dict):
        entries = {key: _split_info(entry, size) for key, entry in value.items()}
        return [{key: values[i] for key, values in entries.items()} for i in range(size)]
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size:
        return [row.clone() for row in value]
    value = recursively_apply(torch.clone, value)
    return value if isinstance(value, list) and len(value) == size else [value] * size


def _join_info(infos: list[dict | None]) -> dict | None:
    if all(info is None for info in infos):
        return None
    keys = dict.fromkeys(chain.from_iterable(info or {} for info in infos))
    return {key: _join_values([(info or {}).get(key) for info in infos]) for key in keys}


def _join_values(values: list) -> Any:
    """Joins values of a key: dicts to a dict, tensors of one shape and dtype to a tensor, all others to a list."""
    if any(isinstance(value, dict) for value in values) and all(isinstance(value, dict | None) for value in values):
        return _join_info(values)
    is_tensor = all(isinstance(value, torch.Tensor) for value in values)
    return torch.stack(values) if is_tensor and len({(value.shape, value.dtype) for value in values}) == 1 else values


# Media


def media_tensors(record: Record) -> dict[str, torch.Tensor]:
    """Returns all media tensors of a batch or sample, by their names in experiences."""
    if not isinstance(record, MediaFields):
        return {}
    tensors = {name: getattr(record, name) for name in chain.from_iterable(_MEDIA.values())}
    media = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    extra = record.extra_media or {}
    duplicates = media.keys() & extra.keys()
    if duplicates:
        raise ValueError(f"`extra_media` gives {sorted(duplicates)} a second time; remove them from `extra_media`.")
    return media | extra


def set_media(record: Record, name: str, tensor: torch.Tensor) -> None:
    """Sets a media tensor by its name in experiences, in place."""
    if isinstance(record, MediaFields) and not hasattr(record, name):
        record.extra_media = {**(record.extra_media or {}), name: tensor}
    else:
        setattr(record, name, tensor)


def join_media_of(
    media: Sequence[dict[str, torch.Tensor]], raw_images: list[list[PIL.Image.Image] | None], batch: ExperienceVL
) -> None:
    """Sets the media of a batch to those of its samples, which are by their names in experiences."""
    for name, tensor in join_tensors(media).items():
        set_media(batch, name, tensor)
    names = dict.fromkeys(chain.from_iterable(media))
    batch.media_rows = {name: [len(tensors.get(name, ())) for tensors in media] for name in names} or None
    batch.raw_images = None if all(images is None for images in raw_images) else raw_images


def share_media(items: Sequence[Record]) -> None:
    """Replaces media tensors of samples by equal tensors of the sample before them, in place."""
    for previous, item in pairwise(items):
        previous_media = media_tensors(previous)
        for name, tensor in media_tensors(item).items():
            if name in previous_media and torch.equal(previous_media[name], tensor):
                set_media(item, name, previous_media[name])


def _media_rows(experience: Experience, media: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Returns how many rows of each media tensor belong to each sample, see [`split_experience_batch`]."""
    size = len(experience.sequences)
    info = experience.info or {}
    rows: dict[str, list[int]] = dict(getattr(experience, "media_rows", None) or {})
    for name, counts in rows.items():
        if name not in media:
            raise ValueError(f"`media_rows` has `{name}`, but the experience has {sorted(media)}.")
        if len(counts) != size or sum(counts) != len(media[name]) or min(counts) < 0:
            raise ValueError(
                f"`media_rows['{name}']` must split {len(media[name])} rows among {size} samples, but is {counts}."
            )
    # Media with fields of their own: by the grid, or by the number of images, videos or clips
    for modality, names in _MEDIA.items():
        for name in (name for name in names if name in media and name not in rows):
            tensor = media[name]
            grid = f"{modality}_grid_thws"
            counts = _media_counts(f"{modality}_num", info.get(f"{modality}_num", 1), size)
            if name == grid and (tensor.dim() != 2 or tensor.size(1) != 3):
                raise ValueError(f"`{grid}` must have shape (N, 3), but has {tuple(tensor.shape)}.")
            if name != grid and grid in media:
                counts = [int(part.prod(1).sum()) for part in media[grid].split(rows[grid])]
                if sum(counts) != len(tensor):
                    raise ValueError(
                        f"`{name}` has {len(tensor)} rows, but its grid has {sum(counts)} patches; if its rows "
                        f"aren't patches, pass the number of rows of each sample in `media_rows['{name}']`."
                    )
            # A tensor of 5 dimensions could also have a row per sample, padded to the largest number of images. Then
            # the lengths don't show which of the two forms the tensor has.
            is_padded_per_sample = tensor.dim() >= 5 and len(tensor) == size and tensor.size(1) == max(counts) > 1
            if sum(counts) != len(tensor) or is_padded_per_sample:
                raise _ambiguity_error(name, tensor, size)
            rows[name] = counts
    # Other media: like a tensor with equally many rows, or one row per sample, if only one of these is possible
    splits = set(map(tuple, rows.values()))
    for name, tensor in media.items():
        if name in rows:
            continue
        candidates = {counts for counts in splits if sum(counts) == len(tensor)}
        if len(tensor) == size:
            candidates.add((1,) * size)
        if len(candidates) != 1:
            raise _ambiguity_error(name, tensor, size)
        rows[name] = list(candidates.pop())
    return rows


def _media_counts(key: str, value: torch.Tensor | list | float, size: int) -> list[int]:
    """Returns the number of images, videos or clips of each sample, from a number, list or tensor in `info`."""
    counts = torch.as_tensor(value, dtype=torch.float64)
    counts = (counts if counts.dim() else counts.expand(size)).tolist()
    if len(counts) != size or any(n != int(n) or n < 0 for n in counts):
        raise ValueError(f"`info['{key}']` must hold a whole number for each of {size} samples, but is {value}.")
    return [int(n) for n in counts]


def _ambiguity_error(name: str, tensor: torch.Tensor, size: int) -> ValueError:
    return ValueError(
        f"It isn't clear which of the {len(tensor)} rows of `{name}` belong to which of {size} samples; pass the "
        f"number of rows of each sample in `media_rows['{name}']`."
    )
