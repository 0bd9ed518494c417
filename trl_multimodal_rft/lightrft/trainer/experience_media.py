# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media of experiences: names of their tensors, and which rows belong to which sample."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from ...encoding.join import join_media
from ...encoding.prompts import EncodedPrompt
from .experience import AUDIO_FIELDS, VISION_FIELDS, Experience, Record


# Names in experiences of models' media tensors, where they differ
MEDIA_FIELDS = {
    "image_grid_thw": "image_grid_thws",
    "video_grid_thw": "video_grid_thws",
    "input_features": "audio_values",
    "audio_input_features": "audio_values",
    "feature_attention_mask": "audio_attention_mask",
    "input_features_mask": "audio_attention_mask",
}

_EXTRA = "extra_media"

# Of each modality the key of `info` with the number of media per sample, the tensor that has a row per medium for
# every model, and those whose rows depend on the model
MEDIA_COUNTS = (
    ("image_num", "image_grid_thws", ("pixel_values",)),
    ("video_num", "video_grid_thws", ("pixel_values_videos",)),
    ("audio_num", None, AUDIO_FIELDS),
)


def media_fields(prompts: list[EncodedPrompt], experience_type: type[Experience]) -> dict[str, Any]:
    """Media of prompts as fields of an experience, `media_rows` among them."""
    known = {field.name for field in fields(experience_type)}
    result: dict[str, Any] = {"extra_media": {}, "media_rows": {}}
    for name, value in join_media(prompts).items():
        field = MEDIA_FIELDS.get(name, name)
        target, key = (result, field) if field in known else (result["extra_media"], name)
        target[key] = value
        result["media_rows"][key] = [len(prompt.media.get(name, ())) for prompt in prompts]
    if "raw_images" in known:
        images = [next((each.media.get("image") for _, each in prompt.decoded), None) for prompt in prompts]
        result["raw_images"] = images if any(images) else None
    result["extra_media"] = result["extra_media"] or None
    return result


def media_tensors(record: Record) -> dict[str, torch.Tensor]:
    """All media of a batch or sample, by the names of experiences."""
    media = {name: getattr(record, name, None) for name in VISION_FIELDS + AUDIO_FIELDS}
    media = {name: tensor for name, tensor in media.items() if tensor is not None}
    extra: dict[str, torch.Tensor] = getattr(record, _EXTRA, None) or {}
    if duplicates := media.keys() & extra.keys():
        raise ValueError(f"`extra_media` gives {sorted(duplicates)} a second time.")
    return media | extra


def set_media(record: Record, name: str, tensor: torch.Tensor) -> None:
    """Sets a media tensor of a sample by its name in experiences, in place."""
    if hasattr(record, name):
        setattr(record, name, tensor)
    else:
        setattr(record, _EXTRA, {**(getattr(record, _EXTRA) or {}), name: tensor})


def share_media(previous: Record, items: Sequence[Record]) -> None:
    """Gives samples the media tensors of the sample before them where they are equal, in place."""
    known = media_tensors(previous)
    for name, new in media_tensors(items[0]).items():
        if name not in known or not torch.equal(known[name], new):
            continue
        for item in items:
            if media_tensors(item).get(name) is new:
                set_media(item, name, known[name])


def split_rows(tensor: torch.Tensor, rows: list[int]) -> list[torch.Tensor | None]:
    """Copies of each sample's rows, `None` without any. Equal adjacent ones become one tensor."""
    parts: list[torch.Tensor | None] = []
    for part in tensor.split(rows):
        previous = parts[-1] if parts else None
        is_equal = previous is not None and torch.equal(previous, part)
        parts.append(None if len(part) == 0 else previous if is_equal else part.clone())
    return parts


def media_rows(experience: Experience, media: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """How many rows of each media tensor belong to each sample, see [`split_experience_batch`]."""
    if not media:
        return {}
    size = len(experience.sequences)
    rows: dict[str, list[int]] = dict(getattr(experience, "media_rows", None) or {})
    for name, numbers in rows.items():
        if name not in media:
            raise ValueError(f"`media_rows` has `{name}`, but the experience has {sorted(media)}.")
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


def _numbers(key: str, value: torch.Tensor | list | float, size: int) -> list[int]:
    """Numbers of media per sample, from any kind of numbers in `info`."""
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
                f"`{name}` has {len(tensor)} rows, but its grid has {sum(patches)} patches; if its rows aren't "
                f"patches, pass how many belong to each sample in `media_rows['{name}']`."
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
        f"It isn't clear which of the {len(tensor)} rows of `{name}` belong to which of {size} samples; pass how many "
        f"belong to each in `media_rows['{name}']`."
    )
