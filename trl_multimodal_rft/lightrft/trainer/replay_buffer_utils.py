# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Experiences split into samples and batched again, with their media.

[`split_experience_batch`] and [`make_experience_batch`] are inverse to each other, up to padding and to `info`, where
values of a whole batch come back once per sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import PIL.Image
import torch
from accelerate.utils import recursively_apply
from torch.nn.utils.rnn import pad_sequence

from ...encoding.join import cat_padded
from ...families import media_padding
from .experience import (
    VISION_FIELDS,
    ActionRecord,
    AudioRecord,
    Experience,
    ExperienceAL,
    ExperienceOmni,
    ExperienceVL,
    OptionalFields,
    Record,
    VisionRecord,
)
from .experience_media import MEDIA_COUNTS, media_rows, media_tensors, set_media, split_rows


@dataclass(eq=False)
class BufferItem(ActionRecord[torch.Tensor]):
    """
    One sample of an experience. For its fields see [`Experience`]: they are its rows there, of the shapes `(S,)` and
    `(A,)`. The last `A` columns of `sequences` are the action columns.
    """

    action_entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None

    @property
    def n_actions(self) -> int:
        """Number of action columns."""
        names = (name for name in _ACTION_FIELDS if getattr(self, name) is not None)
        return next((getattr(self, name).numel() for name in names), 0)

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
        """Whether the reward, if known, is a number."""
        return "reward" not in (self.info or {}) or not math.isnan(self.reward)


@dataclass(eq=False)
class _MediaItem(OptionalFields[torch.Tensor], BufferItem):
    extra_media: dict[str, torch.Tensor] | None = None


@dataclass(eq=False)
class BufferItemVL(_MediaItem, VisionRecord[torch.Tensor]):
    """One sample of an experience, see [`ExperienceVL`]; media may be `None`."""


@dataclass(eq=False)
class BufferItemAL(_MediaItem, AudioRecord[torch.Tensor]):
    """One sample of an experience, see [`ExperienceVL`] and see [`AudioRecord`]; media may be `None`."""


@dataclass(eq=False)
class BufferItemOmni(BufferItemAL, BufferItemVL):
    """One sample of an [`ExperienceOmni`]. Its fields are those of [`BufferItemVL`] and [`BufferItemAL`]."""


# By whether they hold images and videos, and audio
TYPES = {
    (False, False): (Experience, BufferItem),
    (True, False): (ExperienceVL, BufferItemVL),
    (False, True): (ExperienceAL, BufferItemAL),
    (True, True): (ExperienceOmni, BufferItemOmni),
}

# Fields with a column per token of the sequence, and per action
_SEQUENCE_FIELDS = ("sequences", "attention_mask")
_ACTION_FIELDS = tuple(each.name for each in fields(BufferItem) if each.name not in (*_SEQUENCE_FIELDS, "info"))


def is_vl_experience(experience: Record) -> bool:
    """
    Whether an experience, or a sample of one, holds vision data.

    Args:
        experience ([`Experience`] or [`BufferItem`]):
            Experience or sample.

    Returns:
        `bool`: Whether it has any image or video tensor.
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
        side, value (*optional*, default to `"left"` and `0`):
            Side (`"left"` or `"right"`) and value of the padding.

    Returns:
        `torch.Tensor`: The stack, shape `(B, ..., max S_i)`, of the same dtype.

    Raises:
        `AssertionError`: If `side` is something else.
        `ValueError`: If there are no sequences.
    """
    assert side in ("left", "right"), f"`side` must be 'left' or 'right', not {side!r}."
    if not sequences:
        raise ValueError("There are no sequences to pad.")
    rows = [sequence.movedim(-1, 0) for sequence in sequences]
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side).movedim(1, -1)


@torch.no_grad()
def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """
    Splits an experience into samples.

    `media_rows` gives the rows of a media tensor that belong to each sample. Without it, samples have as many images,
    videos and clips as `image_num`, `video_num` and `audio_num` in `info`, or one each; a grid then has one row per
    medium, tensors with a grid one row per patch, the others one per medium.

    Args:
        experience ([`Experience`]):
            The batch, padded or packed.

    Returns:
        `list[BufferItem]`: The samples, of the matching type. They share no memory with the batch, but equal media of
        adjacent samples, such as those of a group, are one tensor.

    Raises:
        `ValueError`: If fields don't match, or if it isn't clear which rows of a media tensor belong to a sample.
    """
    size = len(experience.sequences)
    if size == 0:
        return []
    columns: dict[str, Any] = {name: _rows(experience, name) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    columns["info"] = _split_info(experience.info, size)
    if isinstance(experience, VisionRecord):
        columns["raw_images"] = _raw_images(experience.raw_images, size)
    _, item_type = TYPES[isinstance(experience, VisionRecord), isinstance(experience, AudioRecord)]
    items = [item_type(**{name: column[i] for name, column in columns.items()}) for i in range(size)]
    for index, item in enumerate(items):
        _n_actions(item, index)

    media = media_tensors(experience)
    rows = media_rows(experience, media)
    for name, tensor in media.items():
        for item, part in zip(items, split_rows(tensor, rows[name]), strict=True):
            if part is not None:
                set_media(item, name, part)
    return items


@torch.no_grad()
def make_experience_batch(
    items: Sequence[BufferItem], packing_samples: bool = False, pad_token_id: int = 0
) -> Experience:
    """
    Batches samples.

    `sequences` and fields of actions are padded on the left, so that the last columns of `sequences` are the action
    columns of every row. Media are joined in order, trailing dimensions padded on the right.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, of any mixture of types.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether to make lists without padding.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Id written on padding.

    Returns:
        [`Experience`]: The batch, of a type that holds the media of all items. A field that is `None` in all items is
        `None`, except for the masks of padding. `info` has one entry per sample: tensors where all are tensors of one
        shape and dtype, else lists, with `None` for samples without the key.

    Raises:
        `ValueError`: If there are no items, or if only some of them have a field.
    """
    if not items:
        raise ValueError("There are no items to batch.")
    lengths = [len(item.sequences) for item in items]
    n_actions = [_n_actions(item, index) for index, item in enumerate(items)]
    columns: dict[str, Any] = {name: _column(items, name) for name in _SEQUENCE_FIELDS + _ACTION_FIELDS}
    if packing_samples:
        columns = recursively_apply(torch.clone, columns)
    else:
        if len(set(lengths)) > 1 and columns["attention_mask"] is None:
            columns["attention_mask"] = [torch.ones_like(item.sequences) for item in items]
        if len(set(n_actions)) > 1 and columns["action_mask"] is None:
            device = items[0].sequences.device
            columns["action_mask"] = [torch.ones(n, dtype=torch.bool, device=device) for n in n_actions]
        columns = {
            name: column and zero_pad_sequences(column, value=pad_token_id if name == "sequences" else 0)
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
    experience_type, _ = TYPES[has_vision, has_audio]
    known = {field.name for field in fields(experience_type)}
    columns |= {name: joined.pop(name) for name in list(joined) if name in known}
    if has_vision or has_audio:
        columns |= {"extra_media": joined or None, "media_rows": row_counts or None}
    if has_vision:
        raw_images = [getattr(item, "raw_images", None) for item in items]
        columns["raw_images"] = None if all(images is None for images in raw_images) else raw_images
    return experience_type(**columns, info=_join_info(_counted_media(items)))


@torch.no_grad()
def remove_padding_in_sequences(items: Sequence[BufferItem], pad_token_id: int | None = None) -> list[BufferItem]:
    """
    Cuts off the padding on both ends of samples.

    A sequence begins and ends as its attention mask does. Action columns beyond its end go, and those before its first
    action, which stand for tokens of the prompt; columns in between stay, masked or not, and so do all where the mask
    is 0 throughout.

    Args:
        items (`Sequence[BufferItem]`):
            The samples, which stay unchanged.
        pad_token_id (`int`, *optional*):
            Id of padding, for samples without an attention mask: runs of it at either end count as padding except
            where the action mask is 1.

    Returns:
        `list[BufferItem]`: New samples; their tensors share no memory with the old ones.

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
        raise ValueError(f"Item {index} has no `attention_mask`, so `pad_token_id` is needed to find its padding.")
    tokens = real.nonzero()
    if len(tokens) == 0:
        raise ValueError(f"Item {index} has no token: its sequence is all padding. Drop it.")
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
    n_actions = item.n_actions
    for name in ("attention_mask", *_ACTION_FIELDS):
        value, length = getattr(item, name), len(item.sequences) if name == "attention_mask" else n_actions
        if value is not None and value.shape != (length,):
            raise ValueError(
                f"`{name}` of item {index} has shape {tuple(value.shape)}, but ({length},) fits its other fields."
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
            f"`{name}` is None in item {missing[0]}, but not in all items; pass it for all items, or for none."
        )
    return column


def _raw_images(raw_images: list | None, size: int) -> list[list[PIL.Image.Image] | None]:
    if raw_images is None:
        return [None] * size
    if len(raw_images) != size:
        raise ValueError(
            f"`raw_images` has {len(raw_images)} entries for {size} samples; pass one list of images per sample."
        )
    return [[images] if isinstance(images, PIL.Image.Image) else images for images in raw_images]


# Info


def _split_info(info: dict | None, size: int) -> list[Any]:
    if info is None:
        return [None] * size
    parts = {key: _split_value(value, size) for key, value in info.items()}
    return [{key: values[i] for key, values in parts.items()} for i in range(size)]


def _split_value(value: Any, size: int) -> list:
    if isinstance(value, dict):
        return _split_info(value, size)
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size:
        return [row.clone() for row in value]
    value = recursively_apply(torch.clone, value)
    return value if isinstance(value, list) and len(value) == size else [value] * size


def _join_info(infos: list[dict | None]) -> dict | None:
    if all(info is None for info in infos):
        return None
    keys = dict.fromkeys(key for info in infos for key in info or {})
    return {key: _join_values([(info or {}).get(key) for info in infos]) for key in keys}


def _join_values(values: list) -> Any:
    if any(isinstance(value, dict) for value in values) and all(isinstance(v, dict | None) for v in values):
        return _join_info(values)
    if all(isinstance(value, torch.Tensor) for value in values):
        if len({(value.shape, value.dtype) for value in values}) == 1:
            return torch.stack(values)
    return values


def _counted_media(items: Sequence[BufferItem]) -> list[dict | None]:
    """The items' `info`. Where some have their number of media, it is added to the others."""
    infos = [item.info for item in items]
    for key, grid, names in MEDIA_COUNTS:
        known = next((info[key] for info in infos if info and key in info), None)
        for index, info in enumerate(infos if known is not None else ()):
            if key not in (info or {}):
                media = media_tensors(items[index])
                number = next((len(media[name]) for name in (grid, *names) if name in media), 0)
                number = known.new_tensor(number) if isinstance(known, torch.Tensor) else number
                infos[index] = {**(info or {}), key: number}
    return infos
