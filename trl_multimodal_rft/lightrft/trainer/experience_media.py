# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media of experiences: what their tensors are called, and which rows belong to which sample."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from ...encoding.join import join_media
from ...encoding.prompts import EncodedPrompt
from .experience import AUDIO_FIELDS, VISION_FIELDS, Experience


# Names of media tensors of models in experiences, where they aren't the same
MEDIA_FIELDS = {
    "image_grid_thw": "image_grid_thws",
    "video_grid_thw": "video_grid_thws",
    "input_features": "audio_values",
    "audio_input_features": "audio_values",
    "feature_attention_mask": "audio_attention_mask",
    "input_features_mask": "audio_attention_mask",
}

# Of each modality the key under which `info` counts its media per sample, the tensor that has a row per medium
# whatever the model, and those whose rows depend on the model.
MEDIA_COUNTS = (
    ("image_num", "image_grid_thws", ("pixel_values",)),
    ("video_num", "video_grid_thws", ("pixel_values_videos",)),
    ("audio_num", None, AUDIO_FIELDS),
)


def media_fields(prompts: list[EncodedPrompt], experience_type: type[Experience]) -> dict[str, Any]:
    """Media of prompts as fields of an experience, `media_rows` among them."""
    own = set(experience_type.__dataclass_fields__)
    result: dict[str, Any] = {"extra_media": {}, "media_rows": {}}
    for name, value in join_media(prompts).items():
        field = MEDIA_FIELDS.get(name, name)
        target = result if field in own else result["extra_media"]
        target[field if field in own else name] = value
        result["media_rows"][field if field in own else name] = [
            len(prompt.media[name]) if name in prompt.media else 0 for prompt in prompts
        ]
    if "raw_images" in own:
        images = [next((each.media.get("image") for _, each in prompt.decoded), None) for prompt in prompts]
        result["raw_images"] = images if any(images) else None
    result["extra_media"] = result["extra_media"] or None
    return result


def media_tensors(record: Any) -> dict[str, torch.Tensor]:
    """All media of a batch or sample, by the names of experiences."""
    names = {field.name for field in fields(record)}
    own = {name: getattr(record, name) for name in VISION_FIELDS + AUDIO_FIELDS if name in names}
    own = {name: tensor for name, tensor in own.items() if tensor is not None}
    extra = (record.extra_media or {}) if "extra_media" in names else {}
    if twice := own.keys() & extra.keys():
        raise ValueError(f"`extra_media` gives {sorted(twice)} a second time.")
    return own | extra


def share_media(previous: Any, items: Sequence[Any]) -> None:
    """Gives samples the media tensors of the one before them where they are equal, in place."""
    names = [name for name in (*VISION_FIELDS, *AUDIO_FIELDS) if hasattr(previous, name) and hasattr(items[0], name)]
    for name in names:
        known, new = getattr(previous, name), getattr(items[0], name)
        if known is not None and new is not None and torch.equal(known, new):
            for item in items:
                if getattr(item, name) is new:
                    setattr(item, name, known)
    known_extra = getattr(previous, "extra_media", None) or {}
    for name, new in (getattr(items[0], "extra_media", None) or {}).items():
        if name in known_extra and torch.equal(known_extra[name], new):
            for item in items:
                if item.extra_media and item.extra_media.get(name) is new:
                    item.extra_media = {**item.extra_media, name: known_extra[name]}


def split_rows(tensor: torch.Tensor, rows: list[int]) -> list[torch.Tensor | None]:
    """Copies of each sample's rows, `None` without any. Equal neighbours become one tensor."""
    parts: list[torch.Tensor | None] = []
    for part in tensor.split(rows):
        if len(part) == 0:
            parts.append(None)
        elif parts and parts[-1] is not None and torch.equal(parts[-1], part):
            parts.append(parts[-1])
        else:
            parts.append(part.clone())
    return parts


def media_rows(experience: Any, media: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """How many rows of each media tensor belong to each sample, see [`split_experience_batch`]."""
    if not media:
        return {}
    size = len(experience.sequences)
    rows = dict(experience.media_rows or {})
    for name, numbers in rows.items():
        if name not in media:
            raise ValueError(f"`media_rows` tells of `{name}`, but the experience has {sorted(media)}.")
        if len(numbers) != size or sum(numbers) != len(media[name]) or min(numbers) < 0:
            raise ValueError(
                f"`media_rows['{name}']` must split {len(media[name])} rows among {size} samples, but is {numbers}."
            )
    info = experience.info or {}
    for key, grid, names in MEDIA_COUNTS:
        numbers = _numbers(key, info[key], size) if key in info else None
        patches = None
        if grid in media:
            rows[grid], patches = _grid_rows(grid, media[grid], rows.get(grid), numbers, size)
            numbers = rows[grid]
        for name in names:
            if name in media and name not in rows:
                rows[name] = _tensor_rows(name, media[name], patches, numbers, size)
    known = set(map(tuple, rows.values()))
    for name, tensor in media.items():
        if name in rows:
            continue
        possible = {numbers for numbers in known if sum(numbers) == len(tensor)}
        if len(tensor) == size:
            possible.add((1,) * size)
        if len(possible) != 1:
            raise _unclear(name, tensor, size)
        rows[name] = list(possible.pop())
    return rows


def _numbers(key: str, value: Any, size: int) -> list[int]:
    """Numbers of media per sample, from whatever kind of numbers `info` holds."""
    numbers = torch.as_tensor(value, dtype=torch.float64)
    numbers = (numbers if numbers.dim() else numbers.expand(size)).tolist()
    if len(numbers) != size or any(n != int(n) or n < 0 for n in numbers):
        raise ValueError(f"`info['{key}']` must hold a whole number for each of {size} samples, but is {value}.")
    return [int(n) for n in numbers]


def _grid_rows(
    name: str, grid: torch.Tensor, rows: list[int] | None, numbers: list[int] | None, size: int
) -> tuple[list[int], list[int]]:
    """Rows of each sample in the grid, and in what the grid describes."""
    if grid.dim() != 2 or grid.size(1) != 3:
        raise ValueError(f"`{name}` must have shape (N, 3), but has {tuple(grid.shape)}.")
    rows = rows or numbers or [1] * size
    if sum(rows) != len(grid):
        raise _unclear(name, grid, size)
    return rows, [int(part.prod(1).sum()) for part in grid.split(rows)]


def _tensor_rows(
    name: str, tensor: torch.Tensor, patches: list[int] | None, numbers: list[int] | None, size: int
) -> list[int]:
    if patches is not None:
        if sum(patches) != len(tensor):
            raise ValueError(
                f"`{name}` has {len(tensor)} rows, but its grid tells of {sum(patches)} patches; if its rows aren't "
                f"patches, say with `media_rows['{name}']` how many belong to each sample."
            )
        return patches
    numbers = numbers or [1] * size
    # With 5 dimensions a row may be a sample's whole set of images, padded to the largest
    padded_sets = tensor.dim() >= 5 and len(tensor) == size and tensor.size(1) == max(numbers) > 1
    if sum(numbers) != len(tensor) or padded_sets:
        raise _unclear(name, tensor, size)
    return numbers


def _unclear(name: str, tensor: torch.Tensor, size: int) -> ValueError:
    return ValueError(
        f"It isn't clear which of the {len(tensor)} rows of `{name}` belong to which of {size} samples; say with "
        f"`media_rows['{name}']` how many belong to each."
    )
