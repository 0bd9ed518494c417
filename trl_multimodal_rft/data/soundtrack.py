# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Decodes the sound of a video."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from .columns import MediaRef
from .containers import check_container
from .loading import decoding, holds_frames, load_audio, open_source, require_module


def load_sound_of_video(
    ref: MediaRef, sampling_rate: int, max_seconds: float | None, overlong: Literal["raise", "truncate"]
) -> np.ndarray | None:
    """The sound of a video within its span as [`load_audio`] gives it, `None` if the video has none."""
    if holds_frames(ref) or hasattr(ref.source, "get_frames_at"):
        return None
    with decoding(ref), open_source(ref) as stream:
        check_container(ref, stream)
        with require_module("av", "video").open(stream) as container:
            if not container.streams.audio:
                return None
    start, end = ref.options.get("video_start", 0.0), ref.options.get("video_end", math.inf)
    if not start and end == math.inf:
        return load_audio(replace(ref, options={}), sampling_rate, max_seconds, overlong)
    whole = load_audio(replace(ref, options={}), sampling_rate)
    span = whole[round(start * sampling_rate) : None if end == math.inf else round(end * sampling_rate)]
    sound = {"array": span, "sampling_rate": sampling_rate}
    return load_audio(replace(ref, source=sound, options={}), sampling_rate, max_seconds, overlong)
