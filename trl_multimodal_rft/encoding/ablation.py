# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Replacements of decoded media, of the same duration and size, so that a prompt keeps its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch

from ..data.columns import MediaRef


# Of pixels
_GREY = 128


@dataclass(frozen=True)
class Ablation:
    """
    What replaces a prompt's media of a kind.

    Args:
        kind (`str`):
            `"image"`, `"audio"` or `"video"`.
        others (`Sequence[MediaRef]`, *optional*, defaults to `()`):
            Media of this kind from elsewhere, which take the places in turn. Without any, sounds are silent, and
            images and frames grey.
    """

    kind: str
    others: Sequence[MediaRef] = ()


def blank(medium: Any) -> Any:
    """Silence or grey pixels, of the type, duration and size of a medium."""
    if isinstance(medium, PIL.Image.Image):
        return PIL.Image.new("RGB", medium.size, (_GREY,) * 3)
    if isinstance(medium, torch.Tensor):
        return torch.full_like(medium, _GREY)
    return np.full_like(medium, _GREY) if medium.ndim == 4 else np.zeros_like(medium)


def fitted(other: Any, medium: Any) -> Any:
    """A medium in the duration and size of another."""
    if isinstance(medium, PIL.Image.Image):
        return other.resize(medium.size)
    if isinstance(medium, torch.Tensor):
        frames = (each.permute(0, 2, 3, 1).numpy() for each in (other, medium))
        return torch.from_numpy(fitted(*frames)).permute(0, 3, 1, 2)
    if medium.ndim == 1:
        return np.resize(other, medium.shape)
    places = np.arange(len(medium)) * len(other) // len(medium)
    size = medium.shape[2], medium.shape[1]
    return np.stack([np.asarray(PIL.Image.fromarray(other[place]).resize(size)) for place in places])
