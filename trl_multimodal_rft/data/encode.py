# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From media references to files that browsers show: for logs, and for servers."""

import io
import math
import os
import re
import wave
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import PIL.Image
from transformers.video_utils import VideoMetadata

from .columns import Encoded, MediaRef
from .loading import decoding, encoded_source, load_image, load_video, read_audio, require_module
from .rules import DEFAULT_RULES, MediaRules
from .sources import fetch_file, open_file


# Files that browsers show, which are logged as they are: their extension, and how they start
_VIEWABLE = {
    "image": {"png": rb"\x89PNG", "jpg": rb"\xff\xd8\xff", "gif": rb"GIF8", "webp": rb"RIFF.{4}WEBP"},
    "audio": {
        "wav": rb"RIFF.{4}WAVE",
        "flac": rb"fLaC",
        "ogg": rb"OggS",
        "mp3": rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]",
    },
    "video": {"mp4": rb".{4}ftyp", "webm": rb"\x1a\x45\xdf\xa3.{,60}webm", "gif": rb"GIF8"},
}
_HEAD = 100  # bytes that tell

_MOST_FRAMES = 64  # of a video that is encoded anew from a file
_UNKNOWN_FPS = 2.0  # at which frames of unknown rate are played


@dataclass(frozen=True)
class EncodedMedium:
    """A medium as it is stored."""

    kind: str  # `"image"`, `"audio"` or `"video"`
    data: bytes  # an encoded file that browsers show
    suffix: str  # its extension, such as `"wav"`
    rules: MediaRules = DEFAULT_RULES  # how large it may be, for the functions that decode

    def ref(self) -> MediaRef:
        """Returns a reference to the medium, for the functions that decode."""
        return MediaRef(self.kind, self.data, {}, self.kind, 0, self.rules)


def encode_medium(ref: MediaRef, max_bytes: float) -> EncodedMedium:
    """
    Encodes a medium for logs.

    A file that browsers show is taken as it is. Everything else becomes PNG, WAV (mono, 16 bits, of the source's own
    rate) or MP4 (H.264, which needs PyAV): decoded values, files of other formats, and videos of which the message
    asks for a span. Of a video file 64 frames are encoded, evenly spaced.
    """
    with decoding(ref):
        file: Any = _source_file(ref)
        suffix = _viewable_suffix(ref, file)
        if suffix is None:
            suffix, encode = _ENCODERS[ref.kind]
            file = encode(ref)

        size = os.path.getsize(file) if isinstance(file, str) else len(file)
        if size > max_bytes:
            raise ref.error(f"{size / 1e6:.1f} MB to log are too many; raise `max_logged_megabytes`")
        with open_file(file) as stream:
            return EncodedMedium(ref.kind, stream.read(), suffix, ref.rules)


def _source_file(ref: MediaRef) -> str | bytes | None:
    """Local path or bytes of a medium that is a file, `None` of decoded values."""
    source = ref.source.value if isinstance(ref.source, Encoded) else ref.source
    if hasattr(source, "_hf_encoded"):  # a decoder that `datasets` has made of a file
        source = source._hf_encoded
    if isinstance(source, dict) and source.get("array") is None:
        source = encoded_source(replace(ref, source=source))
    if isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)):
        return fetch_file(ref, source)
    return None


def _viewable_suffix(ref: MediaRef, file: str | bytes | None) -> str | None:
    """Extension of a file that browsers show and that is what the message asks for."""
    if file is None or {"video_start", "video_end"} & ref.options.keys():
        return None
    with open_file(file) as stream:
        head = stream.read(_HEAD)
    return next((suffix for suffix, start in _VIEWABLE[ref.kind].items() if re.match(start, head, re.DOTALL)), None)


def png(image: PIL.Image.Image | np.ndarray) -> bytes:
    """Encodes an image."""
    buffer = io.BytesIO()
    (PIL.Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, "PNG")
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: float) -> bytes:
    """Encodes a sound, its channels averaged, with 16 bits."""
    if samples.ndim > 1:
        samples = samples.mean(axis=np.argmin(samples.shape))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(round(rate))
        file.writeframes((samples * 2**15).round().clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(frames: np.ndarray, rate: float) -> bytes:
    """Encodes a video with H.264, which needs PyAV."""
    av = require_module("av", "video")
    # H.264 halves the resolution of colours
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


def spread_frames(ref: MediaRef, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Decodes evenly spaced frames of a video, of the span that its options `video_start` and `video_end` select."""
    start, end = ref.options.get("video_start", 0), ref.options.get("video_end", math.inf)

    def indices(metadata: VideoMetadata) -> list[int]:
        last = metadata.total_num_frames - 1
        first = min(math.ceil(start * metadata.fps), last) if start else 0
        last = max(math.floor(min(end * metadata.fps, last)), first) if end < math.inf else last
        metadata.total_num_frames = last - first + 1
        return np.linspace(first, last, min(count, last - first + 1)).round().astype(int).tolist()

    return load_video(ref, indices)


def _encode_audio(ref: MediaRef) -> bytes:
    samples, rate = read_audio(ref)
    if rate is None:
        raise ref.error("its sampling rate isn't known")
    return wav(samples, rate)


def _encode_video(ref: MediaRef) -> bytes:
    frames, metadata = spread_frames(ref, _MOST_FRAMES)
    return mp4(frames, (metadata["fps"] or _UNKNOWN_FPS) * len(frames) / metadata["total_num_frames"])


_ENCODERS = {
    "image": ("png", lambda ref: png(load_image(ref))),
    "audio": ("wav", _encode_audio),
    "video": ("mp4", _encode_video),
}
