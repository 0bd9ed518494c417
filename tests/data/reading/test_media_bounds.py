# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The cost of decoding, whatever a file claims. Decoding in pieces equals decoding the whole."""

import contextlib
import io
import re
import struct
import threading
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import av
import fsspec
import numpy as np
import pytest
import soundfile
import soxr
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers import files
from helpers.clips import shown
from helpers.files import image_file, load, load_by_qwen, ref, sound_file
from PIL import EpsImagePlugin, ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from trl_multimodal_rft.data.reading import decoding, images
from trl_multimodal_rft.data.reading.containers import check_complete
from trl_multimodal_rft.data.reading.decoding import load_audio, load_image, load_video, read_audio
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.reading.rules import DEFAULT_RULES, MediaRules


RATE = 16000


def noise(seconds, rate=RATE, channels=2):
    return np.random.default_rng(0).uniform(-0.5, 0.5, (int(seconds * rate), channels)).astype(np.float32)


def av_sound(name, codec, seconds=2, mux=None):
    return files.sound_by_ffmpeg(noise(seconds, RATE, 1), RATE, name, codec, mux)


def video_file(name="mp4", codec="libx264", frames=12, width=96, height=64, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return files.video_file([np.roll(pixels, 2 * i, 1) for i in range(frames)], name, codec, **options)


def allocated(function):
    """Returns the peak memory of Python and NumPy in bytes."""
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(message, source, most, rules=DEFAULT_RULES):
    """Asserts that an image raises an error within a limit of memory."""

    def run():
        with pytest.raises(MediaError, match=message):
            load_image(ref("image", source, rules))

    assert allocated(run)[1] < most


# Sounds


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("name", ["WAV", "FLAC", "MP3", "OGG", "AIFF"])
def test_pieces_are_the_whole(name, rate):
    """As libsndfile reads them; FFmpeg has another decoder of MP3 and of Vorbis."""
    data = sound_file(noise(2.5, rate), rate, name)
    rounding = {"MP3": 3e-6, "OGG": 1e-6}.get(name, 0)
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        whole = sound.read(dtype="float32")
    for window, overlong in ((None, "raise"), (1.3, "truncate"), (9.0, "truncate")):
        samples = whole.mean(axis=1)[: None if window is None else int(window * rate)]
        expected = samples if rate == RATE else soxr.resample(samples, rate, RATE)
        found = load_audio(ref("audio", data), RATE, window, overlong)
        np.testing.assert_allclose(found, expected, rtol=0, atol=rounding)
    np.testing.assert_allclose(read_audio(ref("audio", data))[0], whole.mean(axis=1), rtol=0, atol=rounding)


@pytest.mark.parametrize("channels", [3, 8, 12])
def test_many_channels_are_averaged(channels):
    samples = noise(0.5, channels=channels)
    found, _ = read_audio(ref("audio", sound_file(samples, RATE, "WAV", subtype="FLOAT")))
    np.testing.assert_array_equal(found, samples.mean(axis=1))


@pytest.mark.parametrize(("name", "codec"), [("mp4", "aac"), ("matroska", "pcm_s16le"), ("mpegts", "aac")])
def test_pieces_of_what_soundfile_does_not_know_are_the_whole(name, codec):
    torchcodec = pytest.importorskip("torchcodec.decoders")
    data = av_sound(name, codec)
    whole = torchcodec.AudioDecoder(data).get_all_samples().data.numpy()[0]
    rounding = 1e-6 if codec == "aac" else 0  # two builds of FFmpeg may have other instructions for a processor
    for limit, end in (((), None), ((0.7, "truncate"), int(0.7 * RATE))):
        np.testing.assert_allclose(load_audio(ref("audio", data), RATE, *limit), whole[:end], rtol=0, atol=rounding)
    for source in (data, torchcodec.AudioDecoder(data)):
        with pytest.raises(MediaError, match="is longer than the model's window of 0.7 s"):
            load_audio(ref("audio", source), RATE, 0.7)
    cut = load_audio(ref("audio", torchcodec.AudioDecoder(data)), RATE, 0.7, "truncate")
    np.testing.assert_array_equal(cut, whole[: int(0.7 * RATE)])


def says_nothing_of_its_length(flac):
    data = bytearray(flac)
    data[21] &= 0xF0  # after `fLaC`, the first block's header and 13 of its bytes
    data[22:26] = bytes(4)
    return bytes(data)


@pytest.mark.gate
def test_what_is_too_long_is_not_decoded():
    """The file is a FLAC of silence, some thousand times smaller than its samples."""
    long = sound_file(np.zeros((200 * 48000, 2), np.int16), 48000, "FLAC")
    assert len(long) < 200 * 48000 * 2 * 4 / 1000
    for data in (long, says_nothing_of_its_length(long)):
        cut, peak = allocated(lambda data=data: load_audio(ref("audio", data), RATE, 2.0, "truncate"))
        assert len(cut) == 2 * RATE and peak < 40e6

        def too_long(data=data):
            for rules, window in ((DEFAULT_RULES, 30.0), (MediaRules(max_audio_seconds=30.0), None)):
                with pytest.raises(MediaError, match="window of 30 s|limit of 30 s"):
                    load_audio(ref("audio", data, rules), RATE, window)

        assert allocated(too_long)[1] < 40e6
        # The bytes of one channel at the target rate, and as many again to join them
        whole, peak = allocated(lambda data=data: load_audio(ref("audio", data), RATE))
        assert len(whole) == 200 * RATE and peak < 2 * whole.nbytes + 40e6


def test_a_window_holds_where_the_rules_are_narrower():
    rules = MediaRules(max_audio_seconds=1.0)
    data = sound_file(noise(3.0, RATE), name="FLAC")
    assert len(load_audio(ref("audio", data, rules), RATE, 0.5, "truncate")) == RATE // 2
    with pytest.raises(MediaError, match="2 s exceed the limit of 1 s; cut it, or raise `max_audio_seconds`"):
        load_audio(ref("audio", data, rules), RATE, 2.0, "truncate")


def test_a_rate_that_can_not_be_is_named_before_the_length():
    data = bytearray(sound_file(noise(10.0, RATE, 1), RATE, "WAV"))
    data[24:28] = struct.pack("<I", 16)
    with pytest.raises(MediaError, match="the sampling rate is 16; set it to the true rate"):
        load_audio(ref("audio", bytes(data)), RATE)


# Videos


@pytest.mark.parametrize("options", [{}, {"nframes": 4, "min_pixels": 999, "max_pixels": 20000}], ids=str)
def test_frames_resized_as_they_come_are_those_of_the_whole(decoder, options, monkeypatch):
    """This also equals `fetch_video`, see the tests of loading."""
    data = video_file(width=320, height=240)
    whole, about = load_by_qwen(ref("video", data, **options), 14)
    monkeypatch.setattr(decoding, "_PIXELS_AT_ONCE", 1)
    by_one, about_one = load_by_qwen(ref("video", data, **options), 14)
    assert torch.equal(whole, by_one) and about == about_one
    np.testing.assert_array_equal(load_video(ref("video", data))[0], shown(data))


def memory(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can't be set back")
def test_videos_are_never_in_memory_at_their_full_size(decoder):
    size = {"min_pixels": 999, "max_pixels": 50000}
    data = video_file(frames=80, width=1280, height=720, options={"preset": "ultrafast", "crf": "40"})
    load_by_qwen(ref("video", data, nframes=4, **size), 14)  # the first call loads what stays in memory
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    frames, _ = load_by_qwen(ref("video", data, nframes=80, **size), 14)
    assert len(frames) == 80
    assert memory("VmHWM") - before < 80 * 1280 * 720 * 3


def test_videos_have_most_pixels_and_a_highest_rate(decoder):
    rules = MediaRules(max_video_pixels=8 * 96 * 64)
    data = video_file()
    with pytest.raises(MediaError, match="12 frames of 96 x 64 are more than .* pixels; choose fewer by 'nframes'"):
        load_video(ref("video", data, rules))
    assert len(load_video(ref("video", data, rules, nframes=8))[0]) == 8
    assert len(load_by_qwen(ref("video", data, rules, max_pixels=3000, min_pixels=100), 14)[0]) > 0
    with pytest.raises(MediaError, match="`max_video_pixels`"):
        load_video(ref("video", [Image.new("RGB", (96, 64))] * 9, rules))
    with pytest.raises(MediaError, match="row 3.*invalid rate of 5000 frames per second"):
        load_video(ref("video", video_file(rate=5000)))


# Images


def icon_that_lies(size):
    inner = image_file(Image.new("RGB", size))
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + inner


@pytest.mark.filterwarnings("ignore:Image was not the expected size")
def test_what_is_in_an_icon_has_most_pixels():
    assert load_image(ref("image", icon_that_lies((40, 30)))).size == (40, 30)
    with pytest.raises(MediaError, match="40 x 30 pixels exceed the limit of 1,000"):
        load_image(ref("image", icon_that_lies((40, 30)), MediaRules(max_image_pixels=1000)))


def test_text_in_an_image_is_not_unpacked_without_end():
    image = image_file(Image.new("RGB", (6, 4)))
    chunk = b"zTXtbomb\0\0" + zlib.compress(bytes(100_000_000), 9)
    bomb = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    refused("row 3, column 'image': cannot read this image", image[:33] + bomb + image[33:], 30e6)


def gif_with(comments):
    data = image_file(Image.new("P", (6, 4)), "GIF")
    return data[:-1].replace(b",", comments + b",", 1) + b";" if comments else data


@pytest.mark.parametrize("blocks", ["one", "many"])
def test_comments_of_a_gif_are_not_joined_without_end(blocks):
    """Pillow copies all previous bytes with each block of 255."""
    count = 4_000_000 // 256
    piece = b"\xff" + b"a" * 255
    comments = b"!\xfe" + piece * count + b"\0" if blocks == "one" else (b"!\xfe" + piece + b"\0") * count
    with pytest.raises(MediaError, match="its metadata takes more than 2,097,152 bytes; save it without metadata"):
        load_image(ref("image", gif_with(comments)))
    assert load_image(ref("image", gif_with(b"!\xfe\x05hello\0"))).size == (6, 4)


def entries(count, length, behind=0):
    """Returns EXIF data, or a TIFF, whose entries all share the same bytes."""
    tags = (*range(1000, 20_000), *range(40_000, 60_000))
    ifd = b"".join(struct.pack("<HHII", tag, 7, length, 8) for tag in tags[:count])
    return b"II*\0" + struct.pack("<IH", 8, count) + ifd + bytes(4 + behind)


def jpeg_with(exif):
    """Uses as many segments as necessary; Pillow joins them."""
    image = image_file(Image.new("RGB", (6, 4)), "JPEG")
    pieces = [exif[i : i + 65_000] for i in range(0, len(exif), 65_000)]
    segments = [b"\xff\xe1" + struct.pack(">H", 8 + len(piece)) + b"Exif\0\0" + piece for piece in pieces]
    return image[:2] + b"".join(segments) + image[2:]


def png_with(exif, text=False):
    info = PngInfo()
    if text:  # in ImageMagick's format
        info.add_text("Raw profile type exif", f"\nexif\n{len(exif)}\n{exif.hex()}", zip=True)
    return image_file(Image.new("RGB", (6, 4)), pnginfo=info, **({} if text else {"exif": b"Exif\0\0" + exif}))


BOMBS = {
    "tiff": lambda: entries(2000, 100_000, 100_000),
    "png": lambda: png_with(entries(2000, 100_000, 100_000)),
    "text": lambda: png_with(entries(2000, 100_000, 100_000), text=True),
    "jpeg": lambda: jpeg_with(entries(2000, 100_000, 100_000)),
    "jpeg of one segment": lambda: jpeg_with(entries(2000, 30_000, 20_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_entries_that_share_their_bytes_do_not_fill_the_memory(name):
    """Pillow would use 200 MB for a file of some kilobytes, and 40 GB for one of a megabyte."""
    data = BOMBS[name]()
    assert len(data) < 300_000
    # Pillow copies one segment before the check, at most 64 kB times 5,000
    most = 70e6 if name == "jpeg of one segment" else 10e6
    # Pillow 13 warns, and skips the entry
    refused("its metadata takes more than|its EXIF data exceeds|UserWarning: Tag data larger than file", data, most)


@pytest.mark.parametrize("make", [jpeg_with, png_with, lambda exif: png_with(exif, text=True)])
def test_an_orientation_is_still_obeyed(make):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.MakerNote] = bytes(range(256)) * 100
    assert load_image(ref("image", make(exif.tobytes()[6:]))).size == (4, 6)


def test_an_image_has_a_time():
    """A JPEG of 50 kB whose last scan repeats takes half a minute, and minutes with 100 million pixels."""
    data = image_file(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    scan = data[data.rfind(b"\xff\xda") : -2]
    assert len(scan) < 100
    with pytest.raises(MediaError, match="row 3.*not read within 0.2 s; remove the row, or raise `media_timeout`"):
        load_image(ref("image", data[:-2] + 800 * scan + data[-2:], MediaRules(media_timeout=0.2)))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_in_pieces_is_the_whole_bit_for_bit(progressive, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    data = image_file(Image.fromarray(pixels), "JPEG", progressive=progressive)
    whole = np.array(Image.open(io.BytesIO(data)))
    monkeypatch.setattr(images, "_JPEG_WORK", 1)
    np.testing.assert_array_equal(np.array(load_image(ref("image", data))), whole)


def test_a_document_starts_no_program(tmp_path, monkeypatch):
    """PIL hasn't rendered the image yet, and the path has a program that would."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (tmp_path / "i.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n")
    with pytest.raises(MediaError, match="row 3, column 'image': this is a document of format EPS; render it"):
        load_image(ref("image", Image.open(tmp_path / "i.eps")))
    assert not (tmp_path / "started").exists()
    Image.new("RGB", (6, 4)).save(tmp_path / "i.pcx")
    assert load_image(ref("image", Image.open(tmp_path / "i.pcx"))).size == (6, 4)


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


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("color", "depth", "channels"), [(0, 1, 1), (0, 16, 1), (2, 8, 3), (6, 8, 4)])
def test_a_png_whose_pixels_end_early_is_named(color, depth, channels, interlaced):
    """Its stream is intact and holds fewer bytes."""
    width = 37
    height = 23
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    sizes = [
        (len(range(x, width, across)), len(range(y, height, down)))
        for x, y, across, down in (passes if interlaced else [(0, 0, 1, 1)])
    ]
    rows = b"".join(b"\0" + b"\x55" * -(-columns * depth * channels // 8) for columns, n in sizes for _ in range(n))

    def png(pixels):
        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
        stream = zlib.compress(pixels)
        parts = chunk(b"IHDR", head), chunk(b"IDAT", stream[:9]), chunk(b"IDAT", stream[9:]), chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts)

    if (color, depth) != (0, 16):  # it has no known scale
        assert load_image(ref("image", png(rows))).size == (width, height)
    for n in (len(rows) - 1, len(rows) // 2, 0):
        with pytest.raises(MediaError, match=f"the image is cut off: {n} of {len(rows)} bytes of pixels; repair it"):
            load_image(ref("image", png(rows[:n])))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0, "quality": 95}, {"restart_marker_rows": 2}, {"optimize": True}],
    ids=str,
)
def test_a_jpeg_that_ends_early_is_named(mode, options):
    """Its end is marked. What is whole stays as Pillow has it, also in the grey of missing blocks."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, 150, 3), np.uint8)
    for picture in (Image.fromarray(pixels), Image.new("RGB", (150, 100), (128, 128, 128))):
        whole = image_file(picture.convert(mode), "JPEG", **options)
        expected = np.asarray(Image.open(io.BytesIO(whole)).convert("RGB"))
        for behind in (b"", bytes(99), whole):
            np.testing.assert_array_equal(np.asarray(load_image(ref("image", whole + behind))), expected)
    whole = image_file(Image.fromarray(pixels).convert(mode), "JPEG", **options)
    for share in (0.4, 0.7, 0.95):
        cut = whole[: int(len(whole) * share)].rstrip(b"\xff") + b"\xff\xd9"
        with pytest.raises(
            MediaError, match="row 3, column 'image': the image is cut off, its scan ends early; repair it"
        ):
            load_image(ref("image", cut))


def part_of_screen(box, color, back, local=False, mode="P", **options):
    """A GIF of 8 x 6 with a frame of one color in a part of its screen."""
    left, top, width, height = box
    picture = Image.new(mode, (width, height), color)
    if mode == "P":
        picture.putpalette([10, 20, 30, 200, 30, 40, 30, 200, 40, 30, 40, 200])
    data = image_file(picture, "GIF", optimize=False, **options)
    colors = 3 * 2 ** (1 + (data[10] & 7))
    frame = data.index(struct.pack("<BHHHH", 44, 0, 0, width, height), 13 + colors)
    screen = struct.pack("<HHBBB", 8, 6, 0 if local else data[10], back, 0)
    place = struct.pack("<BHHHHB", 44, left, top, width, height, data[10] if local else 0)
    table = data[13 : 13 + colors]
    pixels = data[frame + 10 :]
    return data[:6] + screen + (b"" if local else table) + data[13 + colors : frame] + place + table * local + pixels


@pytest.mark.parametrize("box", [(0, 0, 8, 6), (2, 1, 4, 3), (7, 5, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("color", "back", "more"),
    [(1, 0, {}), (0, 3, {}), (1, 2, {"transparency": 3}), (1, 0, {"local": True}), (9, 3, {"mode": "L"})],
)
def test_a_gif_that_fills_a_part_of_its_screen_is_that_of_ffmpeg(box, color, back, more):
    data = part_of_screen(box, color, back, **more)
    with av.open(io.BytesIO(data)) as container:
        shown = next(container.decode(video=0)).to_ndarray(format="rgba")
    expected = np.where(shown[..., 3:] > 0, shown[..., :3], 255)
    assert shown.shape[:2] == (6, 8)
    np.testing.assert_array_equal(np.asarray(load_image(ref("image", data))), expected)
    np.testing.assert_array_equal(load_video(ref("video", data))[0][0], expected)


# Compressed files, and files of another type


def packed_zeros(size, folder):
    """Returns a link to a file of zeros in an archive a thousand times smaller."""
    path = folder / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("i.png", bytes(size))
    assert path.stat().st_size < size / 500
    return f"zip://i.png::{path}"


def test_what_is_unpacked_has_a_largest_size(tmp_path):
    link = packed_zeros(60_000_000, tmp_path)
    for most, message, held in (
        (10_000_000, "more than .* bytes; remove the row or raise `max_media_bytes`", 20e6),
        (60_000_000, "cannot read", 90e6),  # once, plus the spare room of a buffer
    ):
        refused(message, link, held, MediaRules(max_media_bytes=most))


def test_headers_of_archives_that_lie_are_long_or_are_many(tmp_path):
    link = packed_zeros(30_000_000, tmp_path)
    data = (tmp_path / "bomb.zip").read_bytes()
    (tmp_path / "bomb.zip").write_bytes(data.replace(struct.pack("<I", 30_000_000), struct.pack("<I", 1000)))
    refused("row 3, column 'image'", link, 10e6)
    # A list of files of 80 MB
    listed = b"PK\1\2" + struct.pack("<6H3I5H2I", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    count = 80_000_000 // len(listed)
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 65535, 65535, count * len(listed), 0, 0)
    with open(tmp_path / "b.zip", "wb") as file:
        file.write(listed * count + end)
    refused("the archive has .* bytes of headers; split it", f"zip://a::{tmp_path / 'b.zip'}", 40e6)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_unpack_all_at_once_are_refused(method, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("i.png", bytes(60_000_000))
    message = f"'i.png' is compressed by method {method}; compress it by"
    rules = MediaRules(max_media_bytes=10_000_000)
    refused(message, f"zip://i.png::{tmp_path / 'a.zip'}", 10e6, rules)


def test_unpacking_ends_with_its_time(tmp_path):
    """Its thread ends, too, although more data would follow."""

    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            reads.append(len(buffer))
            time.sleep(0.01)
            return len(buffer)

    class Store(MemoryFileSystem):
        protocol = "endless"

        def _open(self, *args, **kwargs):
            return io.BufferedReader(Endless())

    reads = []
    fsspec.register_implementation("endless", Store, clobber=True)
    threads = threading.active_count()
    rules = MediaRules(allowed_media_protocols=("endless",), media_timeout=0.3, max_media_bytes=2**40)
    with pytest.raises(MediaError, match="row 3.*`media_timeout`"):
        load_image(ref("image", "endless://i.png", rules))
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads
    count = len(reads)
    time.sleep(0.2)
    assert len(reads) == count > 0


@pytest.mark.parametrize("name", ["GIF", "PNG", "TIFF", "WEBP"])
def test_only_the_first_of_several_images_is_decoded(name):
    first, *others = (Image.new("RGB", (600, 500), (i, 40, 90)) for i in range(0, 240, 8))
    several = image_file(first, name, save_all=True, append_images=others)
    image, peak = allocated(lambda: load_image(ref("image", several)))
    assert image.size == (600, 500) and abs(image.getpixel((9, 9))[0]) < 4
    assert peak < len(several) + 10e6


# Truncated files, and playlists


def gif():
    pictures = [Image.fromarray(np.uint8(noise(1, 80, 90) * 255 + 128)) for _ in range(6)]
    first, *others = (picture.rotate(60 * i) for i, picture in enumerate(pictures))
    return image_file(first, "GIF", save_all=True, append_images=others, duration=100)


WHOLE = {
    "wav": lambda: sound_file(noise(1.0, RATE), RATE, "WAV"),
    "wav adpcm": lambda: sound_file(noise(1.0, RATE, 1), RATE, "WAV", subtype="IMA_ADPCM"),
    "aiff": lambda: sound_file(noise(1.0, RATE), RATE, "AIFF"),
    "flac": lambda: sound_file(noise(2.0, RATE), RATE, "FLAC"),
    "flac of ffmpeg": lambda: av_sound("flac", "flac"),
    "ogg": lambda: sound_file(noise(3.0, RATE), RATE, "OGG"),
    "opus": lambda: sound_file(noise(3.0, RATE), RATE, "OGG", subtype="OPUS"),
    "opus of ffmpeg": lambda: av_sound("ogg", "libopus"),
    "mp3": lambda: sound_file(noise(2.0, RATE), RATE, "MP3"),
    "m4a": lambda: av_sound("mp4", "aac"),
    "mka": lambda: av_sound("matroska", "aac"),
    "tta": lambda: av_sound("tta", "tta"),
    "wavpack": lambda: av_sound("wv", "wavpack", seconds=5),
    "mp4": video_file,
    "mkv": lambda: video_file("matroska"),
    "webm": lambda: video_file("webm", "libvpx-vp9"),
    "avi": lambda: video_file("avi", "mpeg4"),
    "gif": gif,
}
VIDEOS = tuple(WHOLE)[tuple(WHOLE).index("mp4") :]


def cuts(data):
    """Returns offsets at which a copy may have ended: some random ones, and the ends of the format's parts."""
    places = {len(data) * i // 12 for i in range(1, 12)} | {len(data) - n for n in (1, 2, 30)}
    with av.open(io.BytesIO(data)) as container:
        packets = sorted({packet.pos for packet in container.demux() if packet.pos})
    parts = [found.start() - (found[0] != b"OggS") * 4 for found in re.finditer(b"OggS|mdat", data)]
    for each in (packets, parts):
        places.update(each[:: max(1, len(each) // 12)], each[-1:])
    return sorted(place for place in places if 0 < place < len(data))


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_left_of_a_file_is_all_of_it_or_named(name):
    """A cut may omit only an index."""
    kind = "video" if name in VIDEOS else "audio"

    def loaded(data):
        medium = load(ref(kind, data))
        return medium[0] if kind == "video" else medium

    data = WHOLE[name]()
    whole = loaded(data)
    named = 0
    for place in cuts(data):
        try:
            left = loaded(data[:place])
        except MediaError as error:
            named += 1
            assert str(error).startswith(f"row 3, column '{kind}': ") and error.args[0].count("\n") == 0
        else:
            assert np.array_equal(left, whole), f"{len(left)} of {len(whole)} at {place} of {len(data)}"
    assert named > 5
    with pytest.raises(MediaError, match="the file is damaged or cut off: .*; fetch it again|cannot read this"):
        loaded(data[: len(data) * 4 // 5])
    if kind == "video":
        with av.open(io.BytesIO(data)) as container:
            assert len(whole) == sum(1 for _ in container.decode(video=0))


@pytest.mark.parametrize("name", ["wav", "aiff", "ogg", "mp3", "m4a", "mkv", "gif"])
def test_tags_around_a_file_are_no_part_of_it(name):
    """Only MP3 starts with a tag, but no format takes a tag for a part of the following data."""
    kind = "video" if name in VIDEOS else "audio"
    data = WHOLE[name]()
    tagged = b"ID3\x04\0\0\0\0\0\x05name:" + data if name == "mp3" else data + bytes(64)
    check_complete(ref(kind, tagged), io.BytesIO(tagged))
    load(ref(kind, tagged))
    cut = len(data) // 2
    with pytest.raises(MediaError, match="the file is damaged or cut off: "):
        load(ref(kind, tagged[:cut]))


def test_fragments_are_whole():
    """A cut within one is seen, and one between two isn't."""
    data = video_file(mux={"movflags": "frag_keyframe+empty_moov"}, frames=24, options={"g": "6"})
    second, third = (found.start() - 4 for found in list(re.finditer(b"moof", data))[1:3])
    frames, _ = load_video(ref("video", data))
    assert len(frames) == 24
    np.testing.assert_array_equal(load_video(ref("video", data[:third]))[0], frames[:12])
    for place in (second + 9, (second + third) // 2, third - 1):
        with pytest.raises(MediaError, match="the file is damaged or cut off: .* of .* bytes"):
            load_video(ref("video", data[:place]))


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_chained_streams_are_heard_to_the_end(subtype):
    one, two = (sound_file(noise(seconds, RATE, 1), RATE, "OGG", subtype=subtype) for seconds in (2.0, 1.0))
    samples, rate = read_audio(ref("audio", one + two))
    with av.open(io.BytesIO(one + two)) as container:
        expected = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    np.testing.assert_array_equal(samples, expected)
    assert abs(len(samples) / rate - 3) < 0.1
    slow = sound_file(noise(1.0, 8000, 1), 8000, "OGG", subtype="VORBIS")
    if subtype == "VORBIS":
        with pytest.raises(MediaError, match="row 3, column 'audio': "):
            load_audio(ref("audio", one + slow), RATE)


@pytest.mark.parametrize("told", [0.5, 2.0, 1 - 1 / 64000])
def test_a_flac_with_another_number_of_samples_than_it_says_is_named(told):
    data = bytearray(sound_file(noise(4.0, RATE, 1), RATE, "FLAC"))
    samples = int(4.0 * RATE * told)
    data[22:26] = samples.to_bytes(4, "big")  # its lower bits
    with pytest.raises(MediaError, match=f"the file is damaged or cut off: [0-9]+ of ({samples}|64000) samples"):
        read_audio(ref("audio", bytes(data)))
    assert len(load_audio(ref("audio", bytes(data)), RATE, 1.0, "truncate")) == RATE  # the header is wrong


@pytest.mark.parametrize("name", ["AVR", "HTK", "SVX", "MAT5", "MPC2K", "PAF", "PVF", "SDS", "IRCAM", "VOC", "WVE"])
def test_sounds_that_may_be_half_in_silence_are_refused(name):
    subtype = "ALAW" if name == "WVE" else "PCM_16"
    rate = 8000 if name == "WVE" else RATE
    message = "this isn't a readable audio file: it starts with .*; convert it to WAV"
    with pytest.raises(MediaError, match=message):
        load_audio(ref("audio", sound_file(noise(1.0, rate, 1), rate, name, subtype=subtype)), RATE)


def heard(data):
    """All samples of FFmpeg, averaged over channels, and their rate. As the program, it skips what isn't a frame."""
    frames = []
    floats = av.AudioResampler(format="fltp")
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(audio=0):
            with contextlib.suppress(av.error.InvalidDataError):
                frames += [piece for frame in packet.decode() for piece in floats.resample(frame)]
    return np.concatenate([frame.to_ndarray().mean(0, dtype=np.float32) for frame in frames]), frames[0].sample_rate


def mp3(seconds, **options):
    return sound_file(noise(seconds, channels=1), RATE, "MP3", **options)


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
    "two by FFmpeg": lambda: 2 * av_sound("mp3", "libmp3lame", 1.5),
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
    data = sound_file(noise(6.0, channels=1), RATE, "OGG", subtype=subtype)
    start, end = pages(data)[3:5]
    assert len(load(ref("audio", data))) == pytest.approx(6 * RATE, abs=2)
    with pytest.raises(
        MediaError, match="row 3, column 'audio': the file is damaged or cut off: page 3 is (damaged|missing)"
    ):
        load(ref("audio", data[:start] + DAMAGES[damage](data[start:end]) + data[end:]))


def test_an_incomplete_page_beyond_4_gib(tmp_path):
    """Tags of the greatest length, in a file with holes, precede the page."""
    longest_tag = 2**28 - 1
    n_tags = 17
    with open(tmp_path / "sound.ogg", "wb+") as file:
        for _ in range(n_tags):
            file.write(b"ID3\x04\0\0" + b"\x7f" * 4)
            file.seek(longest_tag, io.SEEK_CUR)
        file.write(b"OggS" + bytes(16))
        assert file.tell() > 2**32
        with pytest.raises(MediaError, match="its last page isn't complete"):
            check_complete(ref("audio", b""), file)


@pytest.mark.parametrize("rate", [8000, 16000, 24000, 48000])
@pytest.mark.parametrize("application", ["voip", "lowdelay"])
@pytest.mark.parametrize("name", ["ogg", "webm", "matroska"])
def test_opus_starts_and_ends_as_it_was_recorded(name, application, rate):
    """FFmpeg writes and reads it; the recording says where it starts."""
    times = np.arange(2 * rate) / rate
    sound = (0.4 * np.sin(2 * np.pi * (200 * times + 300 * times**2))).astype(np.float32) * (times > 0.25)
    data = files.sound_by_ffmpeg(sound[:, None], rate, name, "libopus", application=application)
    samples, found_rate = read_audio(ref("audio", data))
    expected, _ = heard(data)
    assert found_rate == 48000
    np.testing.assert_array_equal(samples, expected)
    recorded = soxr.resample(sound, rate, 48000)
    lags = [np.dot(recorded[500:-500], samples[500 + lag : len(recorded) - 500 + lag]) for lag in range(-400, 401)]
    assert len(samples) == len(recorded) and abs(np.argmax(lags) - 400) < 4


def test_streams_without_a_length():
    whole = av_sound("mpegts", "aac", seconds=4)
    half = load_audio(ref("audio", whole[: 188 * (len(whole) // 376)]), RATE)
    assert RATE < len(half) < 3 * RATE


def test_channels_that_cancel_each_other_out_are_named_after_all_pieces():
    quiet = noise(2.0, RATE, 1)
    opposite = np.concatenate([quiet, -quiet], axis=1)
    all_of_it = sound_file(opposite, RATE, "FLAC")
    its_start = sound_file(np.concatenate([opposite, noise(1.0, RATE)]), RATE, "FLAC")
    for data, window in ((all_of_it, None), (its_start, 1.5)):
        with pytest.raises(MediaError, match="its channels cancel each other out"):
            load_audio(ref("audio", data), RATE, window, "truncate")
    assert len(load_audio(ref("audio", its_start), RATE)) == 3 * RATE
