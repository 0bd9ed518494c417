# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Synthetic media files, and the package's loaders for them."""

import io
import json
from functools import partial

import numpy as np
import pytest
import soundfile
import torch

from trl_multimodal_rft.data.reading import decoding, qwen
from trl_multimodal_rft.data.reading.refs import MediaRef
from trl_multimodal_rft.data.reading.rules import DEFAULT_RULES

from .chats import RATE, video


def ref(kind, source, rules=DEFAULT_RULES, **options):
    """Returns a reference to an image, sound or video of row 3, in a column with the name of its modality."""
    return MediaRef(kind, source, options, kind, 3, rules=rules)


def load(medium):
    if medium.modality == "audio":
        return decoding.load_audio(medium, RATE)
    return decoding.load_image(medium) if medium.modality == "image" else decoding.load_video(medium)


def load_by_qwen(medium, patch):
    """Returns an image or a video as qwen-vl-utils samples and resizes it, by the options of its content block."""
    if medium.modality == "image":
        from qwen_vl_utils import vision_process

        return vision_process.fetch_image({**medium.options, "image": decoding.load_image(medium)}, patch)
    resize = partial(qwen.qwen_resized, medium.options, patch)
    frames, metadata = decoding.load_video(medium, partial(qwen.qwen_frame_indices, medium.options), resize)
    return torch.from_numpy(frames).permute(0, 3, 1, 2), metadata


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sound_file(samples, rate=RATE, name="WAV", **options) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=name, **options)
    return buffer.getvalue()


def sound_by_ffmpeg(samples, rate, name, codec, mux=None, **options) -> bytes:
    """Returns a sound file that FFmpeg writes from samples of shape (N, 1)."""
    import av  # tests on a GPU run without PyAV

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name, options=mux or {}) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono", options=options)
        stream.bit_rate = 64000
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout="mono")
        frame.sample_rate = rate
        context = stream.codec_context
        resampler = av.AudioResampler(context.format.name, "mono", rate, frame_size=context.frame_size or 0)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return buffer.getvalue()


def image_file(picture, name="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return buffer.getvalue()


def video_file(frames, name="mp4", codec="libx264", rate=10, mux=None, path=None, **settings) -> bytes:
    """
    Returns the bytes of a video file. `frames` are arrays `(height, width, 3)` of one size, `rate` is in Hz,
    `mux` are options of the container, and `settings` attributes of the stream. Some options need a file at `path`.
    """
    import av

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


def write_film(path, frames=20, width=96, height=64, rate=10) -> str:
    """Writes a video file and returns its path."""
    video_file(video(frames, width, height)["video"], codec="mpeg4", rate=rate, path=path)
    return str(path)


# Playlists by which FFmpeg would open the file SECRET, or a port. FFmpeg skips ID3 tags, and finds some playlists
# behind other data.
_TAG = b"ID3\x04\0\0\0\0\0\x02ab"
_SDP = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=No\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
_HLS = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nSECRET\n#EXT-X-ENDLIST\n"
_CONCAT = b"ffconcat version 1.0\nfile 'SECRET'\n"
LISTS = {
    "hls": _HLS,
    "ffconcat": _CONCAT,
    "sdp": _SDP[1:],
    "dash": b'<?xml version="1.0"?><MPD profiles="urn:mpeg:dash:profile:isoff-main:2011">SECRET</MPD>',
    "hls behind a tag": _TAG + _HLS,
    "ffconcat behind tags": _TAG + _TAG + _CONCAT,
    "sdp behind a start": b"RIFF" + _SDP,
    "dash behind a start": b"RIFF<MPD profiles='urn:mpeg:dash:profile:isoff-main:2011'>",
    "sdp in a packet": b"G" + _SDP.ljust(187) + b"G",
}


@pytest.fixture(params=["torchcodec", "pyav"])
def decoder(request, monkeypatch):
    """Runs the test with torchcodec, and then with PyAV."""
    if request.param == "pyav":
        monkeypatch.setattr(decoding, "is_torchcodec_usable", lambda: False)
    elif not decoding.is_torchcodec_usable():
        pytest.skip("torchcodec or the FFmpeg it needs can't be loaded")
