# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Replaces decoded media by others of the same duration and size, so that the prompt keeps its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch

from ..data.columns import MediaRef


_GREY = 128  # pixel value


@dataclass(frozen=True)
class Ablation:
    """The replacement of a prompt's media of one kind."""

    kind: str  # "image", "audio" or "video"
    others: Sequence[MediaRef] = ()  # replacements of this kind, in turn; without any, silence or grey pixels


def blank(medium: Any) -> Any:
    """Silence or grey pixels of the type, duration and size of a medium."""
    if isinstance(medium, PIL.Image.Image):
        return PIL.Image.new("RGB", medium.size, (_GREY,) * 3)
    if isinstance(medium, torch.Tensor):
        return torch.full_like(medium, _GREY)
    return np.full_like(medium, _GREY) if medium.ndim == 4 else np.zeros_like(medium)


def fitted(other: Any, medium: Any) -> Any:
    """Fits `other` to the duration and size of a medium."""
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
