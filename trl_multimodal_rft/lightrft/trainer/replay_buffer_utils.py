# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Experiences taken apart into samples and put together again, media and all.

[`split_experience_batch`] and [`make_experience_batch`] are inverse to each other, up to padding and to `info`, where
what was about a whole batch comes back once per sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import PIL.Image
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ...encoding.join import cat_padded
from ...families import media_padding
from .experience import (
    VISION_FIELDS,
    AudioRecord,
    Experience,
    ExperienceAL,
    ExperienceOmni,
    ExperienceVL,
    Record,
    VisionRecord,
    map_tensors,
)
from .experience_media import MEDIA_COUNTS, media_rows, media_tensors, split_rows


@dataclass(eq=False)
class BufferItem(Record):
    """
    One sample of an experience. For its fields see [`Experience`]: they are its rows there, of the shapes `(S,)` and
    `(A,)`. The last `A` columns of `sequences` are the action columns.
    """

    action_log_probs: Any
    base_action_log_probs: Any
    values: Any
    returns: Any
    advantages: Any
    attention_mask: Any
    action_mask: Any
    info: Any
    action_entropy: Any = None
    kl: Any = None


@dataclass(eq=False)
class _MediaItem(BufferItem):
    action_log_probs: Any = None
    base_action_log_probs: Any = None
    values: Any = None
    returns: Any = None
    advantages: Any = None
    attention_mask: Any = None
    action_mask: Any = None
    info: Any = None
    extra_media: Any = None


@dataclass(eq=False)
class BufferItemVL(_MediaItem, VisionRecord):
    """One sample of an experience, see [`ExperienceVL`]; media it has none of are `None`."""


@dataclass(eq=False)
class BufferItemAL(_MediaItem, AudioRecord):
    """One sample of an experience, see [`ExperienceAL`]; media it has none of are `None`."""


@dataclass(eq=False)
class BufferItemOmni(BufferItemAL, BufferItemVL):
    """One sample of an [`ExperienceOmni`]. Its fields are those of [`BufferItemVL`] and [`BufferItemAL`]."""


# By whether there is room for images and videos, and for audio
_TYPES = {
    (False, False): (Experience, BufferItem),
    (True, False): (ExperienceVL, BufferItemVL),
    (False, True): (ExperienceAL, BufferItemAL),
    (True, True): (ExperienceOmni, BufferItemOmni),
}

# What has a column for each token of the sequence, and for each action
_SEQUENCE_FIELDS = ("sequences", "attention_mask")
_ACTION_FIELDS = (
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
    "action_mask",
    "kl",
    "action_entropy",
)


def is_vl_experience(experience: Record) -> bool:
    """
    Whether an experience, or a sample of one, holds vision data.

    Args:
        experience ([`Experience`] or [`BufferItem`]):
            What is asked about.

    Returns:
        `bool`: Whether any of its image or video tensors is given.
    """
    return isinstance(experience, VisionRecord) and any(getattr(experience, n) is not None for n in VISION_FIELDS)


def zero_pad_sequences(
    sequences: Sequence[torch.Tensor], side: Literal["left", "right"] = "left", value: float = 0
) -> torch.Tensor:
    """
    Pads tensors to the longest last dimension and stacks them.

    Args:
        sequences (`Sequence[torch.Tensor]`):
            Tensors of shape `(..., S_i)`, equal but for the last dimension.
        side (`str`, *optional*, defaults to `"left"`):
            Where padding goes, `"left"` or `"right"`.
        value (`float`, *optional*, defaults to `0`):
            What padding holds.

    Returns:
        `torch.Tensor`: The stack, shape `(B, ..., max S_i)`, of the same dtype.

    Raises:
        `AssertionError`: If `side` is something else.
        `ValueError`: If there are no sequences.
    """
    assert side in ("left", "right"), f"`side` must be 'left' or 'right', not {side!r}."
    if not sequences:
        raise ValueError("There are no sequences to pad.")
    if all(sequence.dim() == 1 for sequence in sequences):
        return pad_sequence(list(sequences), batch_first=True, padding_value=value, padding_side=side)
    longest = max(sequence.size(-1) for sequence in sequences)
    gaps = [longest - sequence.size(-1) for sequence in sequences]
    pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.stack([F.pad(sequence, pad, value=value) for sequence, pad in zip(sequences, pads, strict=True)])


@torch.no_grad()
def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """
    Takes an experience apart.

    How many rows of a media tensor belong to a sample is what `media_rows` says. Without it, samples have as many
    images, videos and clips as `image_num`, `video_num` and `audio_num` in `info` say, or one each; a grid then has
    one row per medium, tensors with a grid one row per patch, the others one per medium.

    Args:
        experience ([`Experience`]):
            The batch, padded or packed.

    Returns:
        `list[BufferItem]`: The samples, of the type that goes with the experience's. They share no memory with the
        batch, but equal media of adjacent samples, such as those of a group, are one tensor.

    Raises:
        `ValueError`: If a field doesn't fit the others, or if it isn't clear which rows of a media tensor belong to a
            sample.
    """
    size = len(experience.sequences)
    if size == 0:
        return []
    columns: dict[str, Any] = {name: _rows(experience, name) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    columns["info"] = _split_info(experience.info, size)
    if isinstance(experience, VisionRecord):
        columns["raw_images"] = _raw_images(experience.raw_images, size)
    _, item_type = _TYPES[isinstance(experience, VisionRecord), isinstance(experience, AudioRecord)]
    items: list[Any] = [item_type(**{name: column[i] for name, column in columns.items()}) for i in range(size)]
    for index, item in enumerate(items):
        _n_actions(item, index)

    media = media_tensors(experience)
    rows = media_rows(experience, media)
    own = {field.name for field in fields(item_type)}
    for name, tensor in media.items():
        for item, part in zip(items, split_rows(tensor, rows[name]), strict=True):
            if part is None:
                continue
            if name in own:
                setattr(item, name, part)
            else:
                item.extra_media = {**(item.extra_media or {}), name: part}
    return items


@torch.no_grad()
def make_experience_batch(
    items: Sequence[BufferItem], packing_samples: bool = False, pad_token_id: int = 0
) -> Experience:
    """
    Puts samples together.

    Padding goes to the left of `sequences` and of all that belongs to actions, so that the last columns of `sequences`
    are the action columns of every row. Media are joined in order, trailing dimensions padded on the right, and
    `media_rows` tells which rows are whose.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, of any mixture of types.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether to make lists without padding.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Id written on padding.

    Returns:
        [`Experience`]: The batch, of a type with room for the media of all items. What is `None` in all items is
        `None`, except that masks are made where there is padding. `info` has one entry per sample: tensors where all
        are tensors of one shape and dtype, else lists, with `None` for samples that lack a key.

    Raises:
        `ValueError`: If there are no items, or if some of them lack a field that others have.
    """
    if not items:
        raise ValueError("There are no items to make an experience of.")
    lengths = [len(item.sequences) for item in items]
    n_actions = [_n_actions(item, index) for index, item in enumerate(items)]
    columns: dict[str, Any] = {name: _column(items, name) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    if packing_samples:
        columns = map_tensors(torch.clone, columns)
    else:
        if len(set(lengths)) > 1 and columns["attention_mask"] is None:
            columns["attention_mask"] = [torch.ones_like(item.sequences) for item in items]
        if len(set(n_actions)) > 1 and columns["action_mask"] is None:
            device = items[0].sequences.device
            columns["action_mask"] = [torch.ones(n, dtype=torch.bool, device=device) for n in n_actions]
        padding = {"sequences": pad_token_id}
        columns = {
            name: None if column is None else zero_pad_sequences(column, value=padding.get(name, 0))
            for name, column in columns.items()
        }

    media: dict[str, list[torch.Tensor]] = {}
    row_counts: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        for name, tensor in media_tensors(item).items():
            media.setdefault(name, []).append(tensor)
            row_counts.setdefault(name, [0] * len(items))[index] = len(tensor)
    joined = {name: cat_padded(tensors, media_padding(name)) for name, tensors in media.items()}

    has_vision, has_audio = (any(isinstance(item, t) for item in items) for t in (VisionRecord, AudioRecord))
    experience_type, _ = _TYPES[has_vision, has_audio]
    own = {field.name for field in fields(experience_type)}
    columns |= {name: joined.pop(name) for name in list(joined) if name in own}
    if has_vision or has_audio:
        columns |= {"extra_media": joined or None, "media_rows": row_counts or None}
    if has_vision:
        raw_images = [item.raw_images if isinstance(item, VisionRecord) else None for item in items]
        columns["raw_images"] = None if all(images is None for images in raw_images) else raw_images
    return experience_type(**columns, info=_join_info(_counted_media(items)))


@torch.no_grad()
def remove_padding_in_sequences(items: Sequence[BufferItem], pad_token_id: int | None = None) -> list[BufferItem]:
    """
    Cuts off what is padding on both ends of samples.

    The attention mask says where a sequence begins and ends. Action columns beyond its end go, and those before its
    first action, which stand for tokens of the prompt; columns in between stay, masked or not, and so do all where the
    mask is 0 throughout.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, left as they are.
        pad_token_id (`int`, *optional*):
            Id of padding, for samples without an attention mask: runs of it at either end count as padding except
            where the action mask is 1.

    Returns:
        `list[BufferItem]`: New samples; their tensors hold nothing of what was cut off.

    Raises:
        `ValueError`: If a sample has no token at all, or neither an attention mask nor a `pad_token_id` is given.
    """
    return [_without_padding(item, index, pad_token_id) for index, item in enumerate(items)]


def _without_padding(item: BufferItem, index: int, pad_token_id: int | None) -> BufferItem:
    length, n_actions = len(item.sequences), _n_actions(item, index)
    if item.attention_mask is not None:
        real = item.attention_mask.bool()
    elif pad_token_id is not None:
        real = item.sequences != pad_token_id
        if item.action_mask is not None:
            real[length - n_actions :] |= item.action_mask.bool()
    else:
        raise ValueError(f"Item {index} has no `attention_mask`, so `pad_token_id` must tell what padding is.")
    tokens = real.nonzero()
    if len(tokens) == 0:
        raise ValueError(f"Item {index} has no token: its sequence is all padding. Leave it out.")
    start, end = int(tokens[0]), int(tokens[-1]) + 1

    # In columns of the action block
    last = max(n_actions - (length - end), 0)
    first = max(last - (end - start), 0)
    if item.action_mask is not None:
        actions = item.action_mask[:last].nonzero()
        first = max(first, int(actions[0])) if len(actions) else first
    changes: dict[str, Any] = {}
    for names, part in ((_SEQUENCE_FIELDS, slice(start, end)), (_ACTION_FIELDS, slice(first, last))):
        for name in names:
            value = getattr(item, name)
            changes[name] = None if value is None else value[part].clone()
    return replace(item, **changes)


def _n_actions(item: BufferItem, index: int) -> int:
    """Number of action columns, once all fields agree on it."""
    if item.sequences.dim() != 1:
        raise ValueError(f"`sequences` of item {index} has shape {tuple(item.sequences.shape)}, not (S,).")
    given = {name: getattr(item, name) for name in ("attention_mask", *_ACTION_FIELDS)}
    given = {name: value for name, value in given.items() if value is not None}
    n_actions = next((value.numel() for name, value in given.items() if name != "attention_mask"), 0)
    for name, value in given.items():
        length = len(item.sequences) if name == "attention_mask" else n_actions
        if value.shape != (length,):
            raise ValueError(
                f"`{name}` of item {index} has shape {tuple(value.shape)}, but ({length},) goes with its other fields."
            )
    if n_actions > len(item.sequences):
        raise ValueError(f"Item {index} has {n_actions} action columns, but only {len(item.sequences)} tokens.")
    return n_actions


# Fields


def _rows(experience: Experience, name: str) -> list[torch.Tensor | None]:
    """A field of each sample."""
    value, size = getattr(experience, name), len(experience.sequences)
    if value is None:
        return [None] * size
    if len(value) != size:
        raise ValueError(f"`{name}` has {len(value)} rows, but there are {size} samples.")
    return [row.clone() for row in value]


def _column(items: Sequence[BufferItem], name: str) -> list[torch.Tensor] | None:
    """A field of all samples."""
    column = [getattr(item, name) for item in items]
    missing = [index for index, value in enumerate(column) if value is None]
    if len(missing) == len(items):
        return None
    if missing:
        raise ValueError(
            f"`{name}` is None in item {missing[0]}, but not in all items; give all of them one, or none."
        )
    return column


def _raw_images(raw_images: list | None, size: int) -> list[list[PIL.Image.Image] | None]:
    if raw_images is None:
        return [None] * size
    if len(raw_images) != size:
        raise ValueError(
            f"`raw_images` has {len(raw_images)} entries for {size} samples; give one list of images per sample."
        )
    return [[images] if isinstance(images, PIL.Image.Image) else images for images in raw_images]


# Info


def _split_info(info: dict | None, size: int) -> list[Any]:
    if info is None:
        return [None] * size
    split: list[dict] = [{} for _ in range(size)]
    for key, value in info.items():
        for own, part in zip(split, _split_value(value, size), strict=True):
            own[key] = part
    return split


def _split_value(value: Any, size: int) -> list:
    if isinstance(value, dict):
        return _split_info(value, size)
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size:
        return [row.clone() for row in value]
    value = map_tensors(torch.clone, value)
    return value if isinstance(value, list) and len(value) == size else [value] * size


def _join_info(infos: list[dict | None]) -> dict | None:
    if all(info is None for info in infos):
        return None
    given = [info or {} for info in infos]
    keys = dict.fromkeys(key for info in given for key in info)
    return {key: _join_values([info.get(key) for info in given]) for key in keys}


def _join_values(values: list) -> Any:
    if any(isinstance(value, dict) for value in values) and all(isinstance(v, dict | None) for v in values):
        return _join_info(values)
    if all(isinstance(value, torch.Tensor) for value in values):
        if len({(value.shape, value.dtype) for value in values}) == 1:
            return torch.stack(values)
    return values


def _counted_media(items: Sequence[BufferItem]) -> list[dict | None]:
    """The items' `info`. Where some tell their number of media, the others do too."""
    infos = [item.info for item in items]
    for key, grid, names in MEDIA_COUNTS:
        known = next((info[key] for info in infos if info and key in info), None)
        if known is None:
            continue
        for index, info in enumerate(infos):
            if key not in (info or {}):
                media = media_tensors(items[index])
                number = next((len(media[name]) for name in (grid, *names) if name in media), 0)
                number = known.new_tensor(number) if isinstance(known, torch.Tensor) else number
                infos[index] = {**(info or {}), key: number}
    return infos
