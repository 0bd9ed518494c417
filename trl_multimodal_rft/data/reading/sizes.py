# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sizes of media in their files, from headers where possible."""

import math
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import PIL.Image
import torch

from .decoding import decoding, holds_frames, open_source, open_video, read_audio_chunks
from .images import open_image
from .refs import MediaRef
from .sources import encoded_source


def media_size(ref: MediaRef) -> dict[str, float]:
    """
    Returns the size of a medium in its file: `pixels` of an image; `seconds` of a sound; `frames`, `seconds`, and
    `pixels` of one frame of a video. The result is empty for a list of frames, and for a medium at a remote URL, which
    would be downloaded again.
    """
    # `encoded_source` doesn't accept a dictionary of samples
    source = None if isinstance(ref.source, dict) and ref.source.get("array") is not None else encoded_source(ref)
    if isinstance(source, str) and "://" in source and not source.startswith("file://"):
        return {}
    # No limits for images and videos, because their pixels aren't kept. Sounds are decoded up to their limit.
    ref = replace(ref, rules=replace(ref.rules, max_image_pixels=2**63, max_video_seconds=math.inf))
    with decoding(ref):
        if ref.modality == "audio":
            return {"seconds": _duration(ref)}
        if ref.modality == "image":
            return {"pixels": _n_pixels(ref)}
        if holds_frames(ref):
            return {}
        with open_video(ref) as (metadata, _):
            if not metadata.total_num_frames:
                raise ref.error("this video has no frame that can be shown; repair it or remove the row")
            seconds = metadata.total_num_frames / (metadata.fps or math.inf)
            pixels = (metadata.width or 0) * (metadata.height or 0)
            return {"frames": metadata.total_num_frames, "seconds": seconds, "pixels": pixels}


def _n_pixels(ref: MediaRef) -> int:
    source = encoded_source(ref)
    if isinstance(source, (np.ndarray, torch.Tensor, list)):
        shape = np.shape(source)
        edges = shape if len(shape) == 2 else sorted(shape)[1:]  # the smallest edge holds the channels
        return math.prod(edges)
    if isinstance(source, PIL.Image.Image):
        return source.width * source.height
    with open_source(ref) as stream:
        return math.prod(open_image(ref, stream).size)


class _LimitReached(Exception):
    """Signal that ends decoding at the limit."""


def _duration(ref: MediaRef) -> float:
    """Returns the seconds of a sound by its header or, if the header has no length, by decoding up to the limit."""
    seconds = 0.0
    n_decoded = 0

    def check(count: float, rate: float) -> None:
        nonlocal seconds
        seconds = max(seconds, count / rate)
        if seconds > ref.rules.max_audio_seconds:
            raise _LimitReached

    with suppress(_LimitReached), closing(read_audio_chunks(ref, None, check)) as chunks:
        for chunk, rate in chunks:
            n_decoded += len(chunk)
            if rate is None or seconds * rate > n_decoded + 1:
                break  # the rate is unknown, or `check` got a larger number of samples, from the header
    return seconds
