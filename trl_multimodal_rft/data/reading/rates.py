# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Times of the frames of videos whose frame rate varies, such as those of phones and of screen recordings."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.video_utils import VideoMetadata

from .refs import MediaRef


_TOLERANCE = 1e-6  # for rounding, in seconds
_LARGEST_DEVIATION = 1 + 1e-6  # frames by which times at a constant rate may be off, as in some formats


@dataclass
class TimedMetadata(VideoMetadata):
    """Metadata of a video, with the seconds of its frames from the first one on if its frame rate varies."""

    times: list[float] | None = None  # of all frames, `None` at a constant rate
    read_times: list[float] = field(default_factory=list)  # of the frames that a decoder has read


def with_times(metadata: VideoMetadata, times: Sequence[float | None]) -> TimedMetadata:
    """
    Returns the metadata of a video with its duration. If the `times` of its packets or frames, in any order,
    contradict the frame rate, the rate becomes the mean. If the rate varies, the metadata have the times.
    """
    count = metadata.total_num_frames
    fps = metadata.fps or 0.0
    sorted_times = []
    if None not in times:
        sorted_times = sorted(time for time in times if time is not None)
        sorted_times = [time - sorted_times[0] for time in sorted_times]
    if _varying(sorted_times, range(count), fps) and sorted_times[-1] > 0:
        fps = (count - 1) / sorted_times[-1]
    varying_times = sorted_times if _varying(sorted_times, range(count), fps) else None
    size = metadata.width, metadata.height
    return TimedMetadata(count, fps, *size, duration=count / fps, times=varying_times)


def proven_metadata(header: TimedMetadata, metadata: TimedMetadata) -> TimedMetadata:
    """
    Returns the metadata that a decoder has read from a file, unless those of the file's packets contradict them. The
    packets have shown whether the rate varies, so the times of decoded frames aren't compared again.
    """
    is_right = metadata.times is None and math.isclose(header.fps or 0, metadata.fps or 0, rel_tol=1e-3)
    return replace(header, read_times=[]) if is_right else metadata


def timed_span(options: dict[str, Any], metadata: VideoMetadata) -> tuple[int, int] | None:
    """
    Returns the first and last frame from `video_start` to `video_end` in a video whose frame rate varies, and sets
    the rate to that of the span. A span without a frame has the frame that is shown at its start. Returns `None` at a
    constant rate.
    """
    times = getattr(metadata, "times", None)
    if times is None:
        return None
    start = options.get("video_start", 0.0)
    duration = metadata.duration or math.inf
    end = min(options.get("video_end", math.inf), duration)
    first = bisect_left(times, start - _TOLERANCE)
    last = bisect_right(times, end + _TOLERANCE) - 1
    if first > last and start < end:
        first = last = bisect_right(times, start) - 1
    if first <= last and start < end:
        metadata.fps = (last - first + 1) / (end - start)
    return first, last


def _varying(times: Sequence[float], indices: Iterable[int], fps: float) -> bool:
    """Returns whether the times of frames differ from those at a constant rate."""
    return any(abs(time * fps - index) > _LARGEST_DEVIATION for time, index in zip(times, indices, strict=False))


def times_in_frames(ref: MediaRef, metadata: VideoMetadata, indices: list[int]) -> list[int] | list[float]:
    """Returns the indices of frames or, if their rate varies, the indices at which a constant rate has their times."""
    if not isinstance(metadata, TimedMetadata) or not metadata.fps:
        return indices
    if metadata.times is not None:
        return [metadata.times[index] * metadata.fps for index in indices]
    if not _varying(metadata.read_times, indices, metadata.fps):
        return indices
    if ref.options.keys() & {"video_start", "video_end"}:
        raise ref.error("its frame rate varies, so a decoder doesn't find the frames of a span; give the file itself")
    return [time * metadata.fps for time in metadata.read_times]
