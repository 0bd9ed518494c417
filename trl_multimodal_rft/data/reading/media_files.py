# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of media references as files that browsers show, for logs and servers."""

import io
import os
import re
import wave
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import PIL.Image
from transformers.video_utils import VideoMetadata

from ...modalities import FIRST_BYTES
from .decoding import (
    decoding,
    evenly_spaced_indices,
    load_image,
    load_video,
    read_audio,
    require_module,
    sample_indices,
)
from .refs import MediaRef
from .rules import DEFAULT_RULES, MediaRules
from .sources import encoded_source, fetch_file, open_file


# Endings of files that browsers show, which are logged unchanged
_VIEWABLE = ("png", "jpg", "gif", "webp", "wav", "flac", "ogg", "mp3", "mp4", "webm")
_HEAD_BYTES = 100  # bytes at the start of a file that tell its format

_MOST_FRAMES = 64  # limit on the frames of a re-encoded video
_UNKNOWN_FPS = 2.0  # playback rate of frames of unknown rate


@dataclass(frozen=True)
class MediaFile:
    """Encoded file of a medium, for logs and servers."""

    modality: str  # `"image"`, `"audio"` or `"video"`
    data: bytes  # an encoded file that browsers show
    suffix: str  # file extension, such as `"wav"`
    rules: MediaRules = DEFAULT_RULES  # limits for decoding the file

    def ref(self) -> MediaRef:
        """Returns a reference to the file, with its modality as the column of errors."""
        return MediaRef(self.modality, self.data, {}, self.modality, 0, self.rules)


def media_file(ref: MediaRef, max_bytes: float) -> MediaFile:
    """
    Encodes a medium as a file for logs. Files that browsers show stay unchanged; all else becomes PNG, WAV (mono, 16
    bits) or MP4 (H.264, up to 64 evenly spaced frames). Raises a [`MediaError`] above `max_bytes`.
    """
    with decoding(ref):
        file = _source_file(ref)
        suffix = None
        if file is not None and not {"video_start", "video_end"} & ref.options.keys():
            with open_file(ref, file) as stream:
                head = stream.read(_HEAD_BYTES)
            starts = FIRST_BYTES[ref.modality].items()
            suffix = next((ending for ending, start in starts if re.match(start, head, re.DOTALL)), None)
        if suffix not in _VIEWABLE or file is None:
            suffix, encode = _ENCODERS[ref.modality]
            file = encode(ref)

        size = os.path.getsize(file) if isinstance(file, str) else len(file)
        if size > max_bytes:
            raise ref.error(f"{size / 1e6:.1f} MB are too much to log")
        with open_file(ref, file) as stream:
            return MediaFile(ref.modality, stream.read(), suffix, ref.rules)


def _source_file(ref: MediaRef) -> str | bytes | None:
    """Returns `None` for media that are decoded already."""
    source = ref.stored
    if hasattr(source, "_hf_encoded"):  # a decoder that `datasets` made from a file
        source = source._hf_encoded
    if isinstance(source, dict) and source.get("array") is None:
        source = encoded_source(replace(ref, source=source))
    if isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)):
        return fetch_file(ref, source)
    return None


def png(image: PIL.Image.Image | np.ndarray) -> bytes:
    """Encodes an image, or an array of its pixels, as PNG."""
    buffer = io.BytesIO()
    (PIL.Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, "PNG")
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: float) -> bytes:
    """Encodes mono samples in -1 to 1, of shape (N,), as WAV with 16 bits. `rate` is in Hz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(round(rate))
        file.writeframes((samples * 2**15).round().clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(frames: np.ndarray, rate: float) -> bytes:
    """Encodes frames of shape (T, H, W, 3) as MP4 with H.264. `rate` is in frames per second. Needs PyAV."""
    av = require_module("av", "video")
    # H.264 halves the resolution of colours, so the height and the width must be even
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate).limit_denominator(1000), options={"crf": "18"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def evenly_spaced_frames(ref: MediaRef, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Decodes up to `count` evenly spaced frames of the span that the options `video_start` and `video_end` select."""
    span = replace(ref, options={k: v for k, v in ref.options.items() if k in ("video_start", "video_end")})

    def spaced_indices(metadata: VideoMetadata) -> list[int]:
        span_indices = sample_indices(span, metadata)
        return [int(span_indices[i]) for i in evenly_spaced_indices(len(span_indices), count)]

    return load_video(ref, spaced_indices)


def _encode_audio(ref: MediaRef) -> bytes:
    samples, rate = read_audio(ref)
    if rate is None:
        raise ref.error("its sampling rate is unknown")
    return wav(samples, rate)


def _encode_video(ref: MediaRef) -> bytes:
    frames, metadata = evenly_spaced_frames(ref, _MOST_FRAMES)
    # The rate at which the selected frames last as long as the video
    return mp4(frames, (metadata["fps"] or _UNKNOWN_FPS) * len(frames) / metadata["total_num_frames"])


_ENCODERS = {
    "image": ("png", lambda ref: png(load_image(ref))),
    "audio": ("wav", _encode_audio),
    "video": ("mp4", _encode_video),
}
