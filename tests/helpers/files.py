# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Synthetic media files, and the package's loaders for them."""

import io

import av
import numpy as np
import pytest
import soundfile

from trl_multimodal_rft.data import loading
from trl_multimodal_rft.data.columns import MediaRef
from trl_multimodal_rft.data.rules import DEFAULT_RULES

from .chats import RATE


def ref(kind, source, rules=DEFAULT_RULES, **options):
    """Returns a medium of row 3, in a column named after its kind."""
    return MediaRef(kind, source, options, kind, 3, rules=rules)


def load(medium):
    if medium.kind == "audio":
        return loading.load_audio(medium, RATE)
    return loading.load_image(medium) if medium.kind == "image" else loading.load_video(medium)


def sound_file(samples, rate=RATE, name="WAV", **options) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=name, **options)
    return buffer.getvalue()


def image_file(picture, name="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return buffer.getvalue()


def video_file(frames, name="mp4", codec="libx264", rate=10, mux=None, path=None, **settings) -> bytes:
    """
    Writes a video. `frames` are arrays of one size, `mux` options of the container, some of which need a `path` as
    output, and `settings` attributes of the stream.
    """
    buffer = io.BytesIO()
    with av.open(buffer if path is None else str(path), "w", format=name, options=mux or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=settings.pop("options", None))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for attribute, value in settings.items():
            setattr(stream, attribute, value)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame))))
        container.mux(stream.encode())
    return buffer.getvalue() if path is None else path.read_bytes()


@pytest.fixture(params=["torchcodec", "pyav"])
def decoder(request, monkeypatch):
    """Runs the test with torchcodec, and then with PyAV."""
    if request.param == "pyav":
        monkeypatch.setattr(loading, "is_torchcodec_usable", lambda: False)
    elif not loading.is_torchcodec_usable():
        pytest.skip("torchcodec or the FFmpeg it needs can't be loaded")
