# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Budgets of a run: the pixels of images and frames, and the frames of a video."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from transformers.video_utils import VideoMetadata

from ..data.columns import MediaRef
from ..data.loading import evenly_spaced, holds_frames


if TYPE_CHECKING:
    from transformers import BaseImageProcessor
    from transformers.video_processing_utils import BaseVideoProcessor


# Of Gemma 4
_FEWEST_SOFT_TOKENS = 70


def with_budgets(ref: MediaRef) -> MediaRef:
    """A reference whose options are those of its block, and the budgets of its run where the block sets none."""
    own, rules = ref.options, ref.rules
    if ref.kind == "audio":
        return ref
    # A limit of the block can move the other limit, which is the run's
    given: dict[str, Any] = {}
    if rules.min_pixels is not None:
        given["min_pixels"] = min(rules.min_pixels, own.get("max_pixels", math.inf))
    if rules.max_pixels is not None:
        given["max_pixels"] = max(rules.max_pixels, own.get("min_pixels", 0))
    if ref.kind == "video" and "nframes" not in own and not holds_frames(ref):
        if rules.video_fps is not None:
            given["fps"] = rules.video_fps
        if rules.max_frames is not None:
            given["max_frames"] = max(rules.max_frames, own.get("min_frames", 0))
    return replace(ref, options={**given, **own}) if given else ref


def budgeted_size(height: int, width: int, options: dict[str, Any], factor: int = 1) -> tuple[int, int]:
    """
    The size of an image within `min_pixels` and `max_pixels`, with its aspect ratio. New sizes are multiples of
    `factor`, to which the processor rounds the others. The maximum prevails where none is within both.
    """
    least, most = options.get("min_pixels", 0), options.get("max_pixels", math.inf)
    area, rounded = height * width, round(height / factor) * round(width / factor) * factor**2
    if rounded > most:
        scale = math.sqrt(most / area)
        sides = [max(1, math.floor(side * scale / factor)) * factor for side in (height, width)]
        # The shorter edge of a long image has at least `factor` pixels, which the longer one makes up for
        longer = sides.index(max(sides))
        sides[longer] = min(sides[longer], max(1, math.floor(most / sides[1 - longer] / factor)) * factor)
        return sides[0], sides[1]
    if rounded < least:
        scale = math.sqrt(least / area)
        tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return (tall, wide) if tall * wide <= most else budgeted_size(tall, wide, {"max_pixels": most}, factor)
    return height, width


def size_factor(processor: "BaseImageProcessor | BaseVideoProcessor | None") -> int:
    """The number of pixels whose multiples a processor of images or videos keeps as sizes, 1 if it has none."""
    patch, merge = (getattr(processor, name, None) for name in ("patch_size", "merge_size"))
    return patch * merge if isinstance(patch, int) and isinstance(merge, int) else 1


def budgeted_image(image: PIL.Image.Image, options: dict[str, Any], factor: int) -> PIL.Image.Image:
    """An image within its budget, resized once."""
    height, width = budgeted_size(image.height, image.width, options, factor)
    return image if image.size == (width, height) else image.resize((width, height), PIL.Image.Resampling.BICUBIC)


def budgeted_frames(frames: np.ndarray, options: dict[str, Any], factor: int) -> np.ndarray:
    """Frames of shape (N, H, W, 3) within their budget."""
    height, width = frames.shape[1:3]
    if budgeted_size(height, width, options, factor) == (height, width):
        return frames
    return np.stack([np.asarray(budgeted_image(PIL.Image.fromarray(each), options, factor)) for each in frames])


def at_most(sample: Callable[..., Any], most: int, metadata: VideoMetadata) -> list[int]:
    """The frames that a rule samples, or as many of them as the budget has, evenly spaced."""
    indices = [int(index) for index in sample(metadata=metadata)]
    return indices if len(indices) <= most else [indices[i] for i in evenly_spaced(len(indices), most)]


def own_terms(processor: "BaseImageProcessor | BaseVideoProcessor | None", most: float) -> dict[str, Any]:
    """
    Arguments of an image processor that enlarges images to its own canvas, in its terms: its number of tiles, its
    longest edge or its number of tokens. Other processors need only smaller images.
    """
    if processor is None or most == math.inf:
        return {}
    size, tiles = getattr(processor, "size", None) or {}, getattr(processor, "max_patches", None)
    if tiles is not None and getattr(processor, "min_patches", None) is not None:
        return {"max_patches": min(tiles, max(processor.min_patches, int(most // (size["height"] * size["width"]))))}
    if (tokens := getattr(processor, "max_soft_tokens", None)) is not None:
        area = (getattr(processor, "patch_size", 0) * getattr(processor, "pooling_kernel_size", 0)) ** 2
        while tokens * area > most and tokens > _FEWEST_SOFT_TOKENS:
            tokens //= 2  # it takes 70, 140, and so on
        return {"max_soft_tokens": tokens}
    tile = (getattr(processor, "max_image_size", None) or {}).get("longest_edge")
    if tile is not None and size.get("longest_edge") is not None and size.get("shortest_edge") is None:
        edge = max(1, math.isqrt(int(most)) // tile) * tile
        return {"size": {"longest_edge": min(size["longest_edge"], edge)}}
    return {}
