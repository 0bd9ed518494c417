# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Files of which a decoder reads a part, or shows it elsewhere: as FFmpeg has them, by formulas, or refused."""

import contextlib
import io
import re
import struct
import zlib

import av
import numpy as np
import pytest
import soxr
from helpers import clips
from helpers.files import image_file, load, ref, sound_by_ffmpeg, sound_file
from PIL import Image

from trl_multimodal_rft.data.reading.decoding import load_image, load_video, read_audio
from trl_multimodal_rft.data.reading.refs import MediaError


RATE = 16000


def noise(seconds, rate=RATE, channels=1):
    return np.random.default_rng(0).uniform(-0.5, 0.5, (int(seconds * rate), channels)).astype(np.float32)


def heard(data):
    """All samples of FFmpeg, averaged over channels, and their rate. As the program, it skips what isn't a frame."""
    frames, floats = [], av.AudioResampler(format="fltp")
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(audio=0):
            with contextlib.suppress(av.error.InvalidDataError):
                frames += [piece for frame in packet.decode() for piece in floats.resample(frame)]
    return np.concatenate([frame.to_ndarray().mean(0, dtype=np.float32) for frame in frames]), frames[0].sample_rate


# Sounds


def mp3(seconds, **options):
    return sound_file(noise(seconds), RATE, "MP3", **options)


def bare(seconds):
    """An MP3 without LAME's header, which is in the first frame; the frames have several sizes."""
    data = mp3(seconds)
    return data[data.index(b"\xff\xf3", 4) :]


ID3V1 = b"TAG" + bytes(125)
JOINED = {
    "two": lambda: mp3(1.5) + mp3(1.0),
    "a short second": lambda: mp3(1.5) + mp3(0.05),
    "a tag with a cover between": lambda: mp3(1.5) + b"ID3\4\0\0\0\0\1\0" + bytes(range(128)) + mp3(1.0),
    "a tag between": lambda: mp3(1.5) + ID3V1 + mp3(1.0) + ID3V1,
    "two by FFmpeg": lambda: 2 * sound_by_ffmpeg(noise(1.5), RATE, "mp3", "libmp3lame"),
    "no header": lambda: bare(1.5),
    "no header, and one": lambda: bare(1.5) + mp3(1.0),
    "one": lambda: mp3(1.5) + ID3V1,
}


@pytest.mark.parametrize("name", JOINED)
def test_all_of_an_mp3_is_heard(name):
    data = JOINED[name]()
    samples, rate = read_audio(ref("audio", data))
    expected, expected_rate = heard(data)
    assert rate == expected_rate == RATE
    np.testing.assert_allclose(samples, expected, atol=1e-4)


# Ogg


def pages(data):
    return [found.start() for found in re.finditer(b"OggS", data)]


DAMAGES = {
    "a sample": lambda page: page[:60] + bytes([page[60] ^ 255]) + page[61:],
    "its sum": lambda page: page[:22] + bytes([page[22] ^ 1]) + page[23:],
    "its start": lambda page: b"Oggs" + page[4:],
    "all of it": lambda page: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_damaged_page_is_named(subtype, damage):
    data = sound_file(noise(6.0), RATE, "OGG", subtype=subtype)
    start, end = pages(data)[3:5]
    assert len(load(ref("audio", data))) == pytest.approx(6 * RATE, abs=2)
    with pytest.raises(
        MediaError, match="row 3, column 'audio': the file is damaged or cut off: page 3 is (damaged|missing)"
    ):
        load(ref("audio", data[:start] + DAMAGES[damage](data[start:end]) + data[end:]))


@pytest.mark.parametrize("rate", [8000, 16000, 24000, 48000])
@pytest.mark.parametrize("application", ["voip", "lowdelay"])
@pytest.mark.parametrize("name", ["ogg", "webm", "matroska"])
def test_opus_starts_and_ends_as_it_was_recorded(name, application, rate):
    """FFmpeg writes and reads it; the recording says where it starts."""
    times = np.arange(2 * rate) / rate
    sound = (0.4 * np.sin(2 * np.pi * (200 * times + 300 * times**2))).astype(np.float32) * (times > 0.25)
    data = sound_by_ffmpeg(sound[:, None], rate, name, "libopus", application=application)
    samples, found_rate = read_audio(ref("audio", data))
    expected, _ = heard(data)
    assert found_rate == 48000
    np.testing.assert_array_equal(samples, expected)
    recorded = soxr.resample(sound, rate, 48000)
    lags = [np.dot(recorded[500:-500], samples[500 + lag : len(recorded) - 500 + lag]) for lag in range(-400, 401)]
    assert len(samples) == len(recorded) and abs(np.argmax(lags) - 400) < 4


# Videos


MATRICES = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]
MATRICES += [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)]  # as in a mirror


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_frames_are_shown_as_their_matrix_says(matrix, decoder):
    """As ISO 14496-12 has it, a pixel at (x, y) is shown at (a x + c y, b x + d y)."""
    a, b, c, d = matrix
    data = clips.encoded("H.264")
    stored = clips.shown(data)[[0, 20, 40]]
    y, x = np.mgrid[: clips.HEIGHT, : clips.WIDTH]
    across, down = a * x + c * y, b * x + d * y
    across, down = across - across.min(), down - down.min()
    expected = np.zeros((3, down.max() + 1, across.max() + 1, 3), np.uint8)
    expected[:, down, across] = stored
    np.testing.assert_array_equal(load_video(ref("video", clips.placed(data, matrix), nframes=3))[0], expected)


def videos(sizes, name, default=None):
    """A file with a video of each size, of which the number is the brightness."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name) as container:
        streams = [container.add_stream("mpeg4", rate=10, width=width, height=height) for width, height in sizes]
        for number, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default if number == default else av.stream.Disposition(0)
        for _ in range(8):
            for number, stream in enumerate(streams):
                picture = np.full((stream.height, stream.width, 3), 60 * number + 40, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        for stream in streams:
            container.mux(stream.encode())
    return buffer.getvalue()


SMALL, LARGE = (32, 32), (96, 64)


SEVERAL = [((SMALL, LARGE), 1), ((LARGE, SMALL), 0), ((SMALL, LARGE, LARGE), 1), ((SMALL, (64, 96), SMALL), 1)]
SEVERAL = [(name, *each, None) for name in ("matroska", "mpegts", "avi") for each in SEVERAL]


@pytest.mark.parametrize(("name", "sizes", "chosen", "default"), [*SEVERAL, ("matroska", (LARGE, SMALL), 1, 1)])
def test_the_largest_of_several_videos_is_shown(name, sizes, chosen, default, decoder):
    """The program `ffmpeg` takes most pixels, and before them a stream that its file marks as the default."""
    frames, metadata = load_video(ref("video", videos(sizes, name, default)))
    assert frames.shape == (8, *sizes[chosen][::-1], 3) and metadata["total_num_frames"] == 8
    assert abs(float(frames.mean()) - 60 * chosen - 40) < 4


# Images


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("size", [(1, 99_000_000), (1_000_001, 1)])
def test_images_of_too_many_rows_are_refused_by_their_header(size):
    """Pillow needs 32 bytes for a row of one pixel."""
    assert load_image(ref("image", image_file(Image.new("1", (1, 1_000_000))))).height == 1_000_000
    header = struct.pack(">I4sIIBBBBB", 13, b"IHDR", *size, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", zlib.crc32(header[4:])) + struct.pack(">I4s", 0, b"IDAT")
    with pytest.raises(
        MediaError, match=f"row 3, column 'image': {size[0]} x {size[1]} pixels exceed 1,000,000 on an edge"
    ):
        load_image(ref("image", data + bytes(4)))
