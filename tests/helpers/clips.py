# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Clips that editors cut without re-encoding, and the frames that FFmpeg decodes from them."""

import functools
import io

import av
import numpy as np

from .files import video_file


# in pixels, frames per second, and frames
WIDTH = 96
HEIGHT = 64
RATE = 10
FRAMES = 60
GROUP = 12
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)

# A group of 12 frames begins with a keyframe. In an open group, up to 3 frames that refer to a keyframe are shown
# before it.
_GROUPS = "keyint=12:min-keyint=12:scenecut=0:bframes=3:b-adapt=0"
CODECS = {
    "H.264": ("libx264", {"x264-params": _GROUPS}),
    "H.264, open groups": ("libx264", {"x264-params": f"{_GROUPS}:open-gop=1"}),
    "HEVC": ("libx265", {"x265-params": f"{_GROUPS}:log-level=none"}),
    "H.264, intra refresh": ("libx264", {"x264-params": "keyint=12:intra-refresh=1:bframes=2"}),
}


@functools.cache
def encoded(name, container="mp4"):
    """Returns a clip of 60 distinct frames."""
    codec, options = CODECS[name]
    frames = [np.roll(PIXELS, 2 * i, 1) for i in range(FRAMES)]
    return video_file(frames, container, codec, RATE, options=options)


@functools.cache
def trimmed(data, start, hidden, container="mp4"):
    """
    Returns a clip with the packets from `start` packets behind the second keyframe on, not re-encoded. The clip's time
    0 is `hidden` frames after this keyframe, so that players hide earlier frames.
    """
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=container) as target:
        video = source.streams.video[0]
        copy = target.add_stream_from_template(video)
        packets = [packet for packet in source.demux(video) if packet.size]
        times = sorted(packet.pts for packet in packets)
        first = [i for i, packet in enumerate(packets) if packet.is_keyframe][1]
        zero = times[times.index(packets[first].pts) + hidden]
        for packet in packets[first + start :]:
            packet.pts = packet.pts - zero
            packet.dts = packet.dts - zero
            packet.stream = copy
            target.mux(packet)
    return out.getvalue()


def placed(data, matrix):
    """Returns an MP4 whose header declares a turned or mirrored camera, by four whole numbers of a 2 x 2 matrix."""
    a, b, c, d = (n % 2**16 * 2**16 for n in matrix)  # fixed point with 16 bits behind the point
    matrix = [a, b, 0, c, d, 0, 0, 0, 2**30]
    offset = data.index(b"tkhd") + 4 + 40  # the matrix in the header of the track
    return data[:offset] + b"".join(n.to_bytes(4, "big") for n in matrix) + data[offset + 36 :]


@functools.cache
def shown(data):
    """Returns all frames of a clip, as the program `ffmpeg` decodes them."""
    with av.open(io.BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
