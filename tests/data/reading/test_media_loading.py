# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Decodes real files in every accepted form, and checks the error of every unusable medium."""

import base64
import io
import sys
from dataclasses import replace
from itertools import product

import av
import datasets
import fsspec
import numpy as np
import pytest
import soundfile
import torch
from data.reading.test_media_sources import answer, site  # noqa: F401
from helpers import chats, clips, families
from helpers.files import image_file, load_by_qwen, ref, sound_by_ffmpeg, sound_file, video_file
from helpers.marks import by_turns
from PIL import ExifTags, Image
from qwen_vl_utils.vision_process import to_rgb

from trl_multimodal_rft.data.reading import decoding
from trl_multimodal_rft.data.reading.decoding import load_audio, load_image, load_video
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.reading.rules import PROTOCOLS, MediaRules
from trl_multimodal_rft.data.reading.sizes import media_size
from trl_multimodal_rft.encoding.media import decode_media
from trl_multimodal_rft.versions import is_torchcodec_usable


RATE = 16000
FPS = 10
FRAMES = 20
WIDTH = 96
HEIGHT = 64
RED = (200, 30, 40)

needs_torchcodec = pytest.mark.skipif(
    not is_torchcodec_usable(), reason="torchcodec or the FFmpeg it needs can't be loaded"
)


def all_frames(*arguments, **options):
    """A file of frames of rising brightness: frame i is grey 12 i on the left, and black on the right."""
    return video_file([frame(i) for i in range(FRAMES)], *arguments, **options)


def tone(rate, seconds=0.5, hertz=440.0):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def frame(i):
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:, : WIDTH // 2] = 12 * i
    return pixels


def shown(frames):
    """Returns the indices of these frames in `all_frames`."""
    return [round(float(f[8:-8, 8 : f.shape[1] // 2 - 8].mean()) / 12) for f in np.asarray(frames)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media files")
    Image.new("RGB", (6, 4), RED).save(folder / "i.png")
    soundfile.write(folder / "a.wav", tone(RATE), RATE)
    (folder / "v.mp4").write_bytes(all_frames(options={"crf": "10"}))
    return folder


FORMS = ("str", "path", "file url", "http", "fsspec", "bytes", "bytearray", "memoryview", "datasets bytes")
FORMS += ("datasets path", "openai", "data uri")


def forms(path, url, mime):
    """Returns the accepted forms of a file."""
    data = path.read_bytes()
    fsspec.filesystem("memory").pipe(path.name, data)
    return {
        "str": str(path),
        "path": path,
        "file url": path.as_uri(),
        "http": url,
        "fsspec": f"memory://{path.name}",
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "datasets bytes": {"bytes": data, "path": "elsewhere"},
        "datasets path": {"bytes": None, "path": str(path)},
        "openai": {"url": url},
        "data uri": f"data:{mime};base64,{base64.encodebytes(data).decode()}",  # with line breaks
    }


@pytest.mark.parametrize("form", FORMS)
def test_files_are_read_in_every_form(folder, site, form):  # noqa: F811
    rules = MediaRules(allowed_media_protocols=(*PROTOCOLS, "memory"))

    def given(kind, name, mime):
        site.answers[f"/{name}"] = answer(body=(folder / name).read_bytes())
        return replace(ref(kind, forms(folder / name, site.url(f"/{name}"), mime)[form]), rules=rules)

    image = load_image(given("image", "i.png", "image/png"))
    assert (image.mode, image.size, image.getpixel((5, 3))) == ("RGB", (6, 4), RED)
    audio = load_audio(given("audio", "a.wav", "audio/wav"), RATE)
    np.testing.assert_allclose(audio, tone(RATE), atol=1 / 32768)
    frames, metadata = load_video(given("video", "v.mp4", "video/mp4"))
    assert shown(frames) == list(range(FRAMES))
    assert metadata["fps"] == FPS


# Images


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "PA", "L", "LA", "CMYK"])
def test_images_of_every_mode_become_rgb(tmp_path, mode):
    original = Image.new("RGB", (6, 4), RED).convert(mode)
    path = tmp_path / ("i.tiff" if mode in ("CMYK", "PA") else "i.png")
    if mode != "PA":  # no file format supports it
        original.save(path)
    image = load_image(ref("image", original if mode == "PA" else path))
    grey = Image.new("RGB", (1, 1), RED).convert("L").getpixel((0, 0))
    expected = {"L": (grey,) * 3, "LA": (grey,) * 3}.get(mode, RED)
    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert np.abs(np.subtract(image.getpixel((3, 2)), expected)).max() <= (40 if mode in ("P", "PA") else 1)


def test_what_is_transparent_is_white():
    original = Image.new("RGBA", (6, 4), (200, 30, 40, 0))
    original.putpixel((0, 0), (200, 30, 40, 128))
    image = load_image(ref("image", image_file(original)))
    assert image.getpixel((3, 2)) == (255, 255, 255)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(to_rgb(original)))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    assert load_image(ref("image", image_file(original, exif=turned))).getpixel((3, 0)) != (255, 255, 255)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, *RED])
    assert load_image(ref("image", image_file(palette, transparency=1))).getpixel((0, 0)) == (255, 255, 255)


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


GREY = np.stack([PIXELS[..., 0]] * 3, -1)
CUBE = PIXELS[:3, :3]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS.tolist(), PIXELS),
        (PIXELS.astype(np.int64), PIXELS),
        ((PIXELS / 255).astype(np.float32), PIXELS),
        (PIXELS.transpose(2, 0, 1), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255, PIXELS),
        (np.dstack([PIXELS, np.full((4, 6), 255, np.uint8)]), PIXELS),
        (PIXELS[..., 0], GREY),
        (PIXELS[..., :1], GREY),
        (torch.from_numpy(PIXELS[None, ..., 0]), GREY),
        # The type determines the order of channels where the shape allows both
        (CUBE, CUBE),
        (torch.from_numpy(CUBE), CUBE.transpose(1, 2, 0)),
    ],
)
def test_arrays_are_images(source, expected):
    np.testing.assert_array_equal(np.asarray(load_image(ref("image", source))), expected)


def test_images_of_datasets(folder):
    rows = datasets.Dataset.from_dict(
        {"image": [str(folder / "i.png")]}, features=datasets.Features(image=datasets.Image())
    )
    undecoded = rows.cast_column("image", datasets.Image(decode=False))
    for row in (rows[0], undecoded[0], next(iter(rows.to_iterable_dataset())), rows.with_format("torch")[0]):
        assert load_image(ref("image", row["image"])).getpixel((0, 0)) == RED


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", "no such file: '"),
        (b"not an image", "cannot read this image (UnidentifiedImageError: none of AVIF, BMP, "),
        (b"<!DOCTYPE html><HTML><svg/></HTML>", "cannot read this image (UnidentifiedImageError: none of AVIF, "),
        (
            b"<!--" + b" " * 300 + b"--><svg/>",
            "cannot read this image (UnidentifiedImageError: SVG; convert it to PNG)",
        ),
        (b"\0\0\0\x18ftypmif1" + bytes(9), "cannot read this image (UnidentifiedImageError: HEIC; convert it to PNG)"),
        ("/", "'/' is a folder; name a file in it"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "cannot read this image (UnidentifiedImageError: SVG; convert ",
        ),
        (b"\0\0\0\x18ftypheic" + bytes(9), "cannot read this image (UnidentifiedImageError: HEIC; convert it to PNG)"),
        ({"array": 1}, "the dictionary has only ['array']; give 'bytes', 'path' or 'url'"),
        ({"path": "a.png", "url": "b.png"}, "the dictionary has media in both 'path' and 'url'; leave one of them"),
        (7, "cannot read this image (TypeError: "),
        (Image.new("RGB", (0, 4)), "the image is empty"),
        (np.zeros((0, 4, 3), np.uint8), "the image is empty"),
        (np.zeros((5, 6, 2), np.uint8), "an image of shape (5, 6, 2); give (H, W, C)"),
        (np.full((4, 6, 3), 255.0), "float64 pixels from 255.0 to 255.0; scale them to 0 to 1"),
        (np.full((4, 6, 3), np.nan), "float64 pixels from nan to nan; scale them to 0 to 1"),
        (np.full((4, 6, 3), 4095, np.uint16), "uint16 pixels from 4095 to 4095; scale them to 0 to 255"),
        (Image.new("I;16", (4, 6)), "pixels of mode 'I;16' have no known scale; convert the image to 8 bits"),
    ],
)
def test_unusable_images_are_named(source, message):
    with pytest.raises(MediaError) as error:
        load_image(ref("image", source))
    assert str(error.value).startswith(f"row 3, column 'image': {message}")


def test_truncated_images_are_named(tmp_path):
    Image.fromarray(chats.mosaic(1, 120, 200, 0)[0]).save(tmp_path / "i.jpg")
    data = (tmp_path / "i.jpg").read_bytes()
    (tmp_path / "i.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(MediaError, match="row 3, column 'image': cannot read this image '.*i.jpg' .*truncated"):
        load_image(ref("image", tmp_path / "i.jpg"))


# Audio


SAMPLES = tone(RATE)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ({"array": SAMPLES, "sampling_rate": RATE}, {}),
        ({"array": SAMPLES.tolist(), "sampling_rate": RATE, "path": None}, {}),
        ({"array": torch.from_numpy(SAMPLES), "sampling_rate": RATE}, {}),
        ({"array": np.stack([SAMPLES * 1.5, SAMPLES * 0.5]), "sampling_rate": RATE}, {}),
        ({"array": np.stack([SAMPLES * 1.5, SAMPLES * 0.5], axis=1), "sampling_rate": RATE}, {}),
        ({"array": SAMPLES.astype(np.float64)}, {"sampling_rate": RATE}),
        ((SAMPLES, RATE), {}),
        (((SAMPLES * 2**15).astype(np.int16), RATE), {}),
        (((SAMPLES * 2.0**31).astype(np.int32), RATE), {}),
        (((SAMPLES * 2**7 + 2**7).round().astype(np.uint8), RATE), {}),
        (SAMPLES, {"sampling_rate": RATE}),
        (SAMPLES.tolist(), {"sampling_rate": float(RATE)}),
    ],
    ids=str,
)
def test_arrays_are_audio(source, options):
    samples = load_audio(ref("audio", source, **options), RATE)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, SAMPLES, atol=1 / 128)


def test_audio_of_datasets(folder):
    paths = datasets.Dataset.from_dict({"audio": [str(folder / "a.wav")]})
    rows = paths.cast_column("audio", datasets.Audio(decode=False))
    structs = datasets.Dataset.from_dict({"audio": [{"array": SAMPLES, "sampling_rate": RATE}]})
    found = [paths[0], rows[0], next(iter(rows.to_iterable_dataset()))]
    found += [structs.with_format(form)[0] for form in (None, "numpy", "torch")]
    if is_torchcodec_usable():
        decoded = paths.cast_column("audio", datasets.Audio())
        found += [decoded[0], next(iter(decoded.to_iterable_dataset()))]
        resampled = decoded.cast_column("audio", datasets.Audio(sampling_rate=8000))[0]
        assert load_audio(ref("audio", resampled["audio"]), 8000).shape == (4000,)
    for row in found:
        np.testing.assert_allclose(load_audio(ref("audio", row["audio"]), RATE), SAMPLES, atol=1 / 32768)


@needs_torchcodec
@pytest.mark.parametrize(("name", "codec"), [("webm", "libopus"), ("mp4", "aac"), ("mp3", "libmp3lame")])
def test_decoders_are_read_once(tmp_path, name, codec):
    """A second reading of a decoder would return other samples, such as shifted ones."""
    path = tmp_path / f"a.{name}"
    loud = np.tile(SAMPLES, 8)[:, None].astype(np.float32)
    path.write_bytes(sound_by_ffmpeg(loud, 48_000, name, codec))
    rows = datasets.Dataset.from_dict({"audio": [str(path)]}).cast_column("audio", datasets.Audio())
    first, second = (rows.with_transform(lambda batch: batch)[0]["audio"] for _ in range(2))
    whole = load_audio(ref("audio", first), RATE)
    np.testing.assert_array_equal(load_audio(ref("audio", first), RATE), whole)
    np.testing.assert_array_equal(load_audio(ref("audio", second), RATE), whole)
    # A part is that of the whole
    start = load_audio(ref("audio", first), RATE, 0.3, "truncate")
    assert len(start) == 0.3 * RATE and np.abs(start[:-50] - whole[: len(start) - 50]).max() < 1e-3
    assert media_size(ref("audio", first))["seconds"] == pytest.approx(len(whole) / RATE, abs=1e-3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.wav", "no such file: '"),
        ({"bytes": None, "path": None}, "the dictionary has only ['bytes', 'path']; give 'bytes', 'path' or 'url'"),
        (SAMPLES, "the array has no sampling rate; give {'array': ..., 'sampling_rate': ...} or a file"),
        (SAMPLES.tolist(), "the array has no sampling rate"),
        (
            {"array": SAMPLES, "sample_rate": 16_000},
            "the array has no sampling rate; rename the key 'sample_rate' to 'sampling_",
        ),
        ({"array": SAMPLES, "sampling_rate": None}, "the array has no sampling rate"),
        ((SAMPLES, 0), "the sampling rate is 0; set it to the true rate in Hz"),
        ((SAMPLES, -8000), "the sampling rate is -8000;"),
        ((SAMPLES, "fast"), "cannot read this audio (ValueError: could not convert"),
        ((SAMPLES, float("nan")), "the sampling rate is nan;"),
        ((SAMPLES[:0], RATE), "the audio is empty"),
        ((np.zeros((2, 0), np.float32), RATE), "the audio is empty"),
        ((SAMPLES[:1], 48000), "1 samples are too short for a spectrogram"),
        ((SAMPLES, 16), "the sampling rate is 16; set it to the true rate in Hz"),
        ((np.stack([SAMPLES, -SAMPLES]), RATE), "its channels cancel each other out; give one channel"),
        ((SAMPLES * 32768, RATE), "float samples up to"),
        ((np.append(SAMPLES, np.nan), RATE), "the audio has NaN or infinite samples"),
        ((np.append(SAMPLES, np.inf), RATE), "the audio has NaN or infinite samples"),
        (([1, -5, 9], RATE), "int64 samples of shape (3,); give floats in -1 to 1, or integers of 8, 16"),
        ((np.zeros((2, 2, 2)), RATE), "float64 samples of shape (2, 2, 2);"),
        ((SAMPLES, RATE, 1), "cannot read this audio (ValueError: too many values to unpack"),
        (((SAMPLES * 2**15).astype(np.int32), RATE), "int32 samples up to 16384 use no more than 24 of 32 bits, so"),
        (((SAMPLES * 2**23).astype(np.int32), RATE), "int32 samples up to 41943"),
        (b"RIFF and no more", "cannot read this audio (InvalidDataError: "),
        (sound_file(SAMPLES[:0]), "the audio is empty"),
        ("data:audio/wav;base64,!UklGRg==", "its data URI isn't base64 ("),
        ("data:audio/wav;base64,UklGRg==UklGRg==", "its data URI isn't base64 ("),
    ],
)
def test_unusable_audio_is_named(source, message):
    with pytest.raises(MediaError) as error:
        load_audio(ref("audio", source), RATE)
    assert str(error.value).startswith(f"row 3, column 'audio': {message}")


@pytest.mark.parametrize(("module", "source"), [("av", b"RIFF"), ("soxr", (SAMPLES, 8000))])
def test_missing_audio_libraries_are_named(monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{module} .*pip install "trl-multimodal-rft\[audio\]"'):
        load_audio(ref("audio", source), RATE)
    load_audio(ref("audio", (SAMPLES, RATE)), RATE)  # needs neither package


# Video


def test_whole_videos(folder, decoder):
    frames, metadata = load_video(ref("video", folder / "v.mp4"))
    assert (frames.shape, frames.dtype) == ((FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    assert shown(frames) == list(range(FRAMES))
    assert frames[..., WIDTH // 2 + 8 :, :].max() < 16
    assert metadata == {"total_num_frames": FRAMES, "fps": FPS, "duration": 2.0, "frames_indices": list(range(FRAMES))}
    sampler = families.qwen3_vl_processor().video_processor.sample_frames  # a processor may override it
    frames, metadata = load_video(ref("video", folder / "v.mp4", nframes=7), sampler)
    assert shown(frames) == metadata["frames_indices"] == [0, 6, 13, 19]


@pytest.mark.parametrize(
    ("options", "indices", "total"),
    [
        ({"nframes": 4}, [0, 5, 10, 15], 20),
        ({"fps": 2}, [0, 5, 10, 15], 20),
        ({"video_start": 0.45, "video_end": 1.09}, [5, 6, 7, 8, 9, 10], 6),
        ({"video_start": 1.0, "fps": 5.0}, [10, 12, 14, 16, 18], 10),
        ({"video_end": 99.0, "nframes": 2}, [0, 10], 20),
    ],
)
def test_options_select_frames(folder, decoder, options, indices, total):
    frames, metadata = load_video(ref("video", folder / "v.mp4", **options))
    assert shown(frames) == metadata["frames_indices"] == indices
    assert (metadata["total_num_frames"], metadata["fps"]) == (total, FPS)


@needs_torchcodec
def test_video_decoded_by_datasets(folder):
    rows = datasets.Dataset.from_dict({"video": [str(folder / "v.mp4")]})
    undecoded = rows.cast_column("video", datasets.Video(decode=False))
    for feature in (datasets.Video(), datasets.Video(dimension_order="NHWC")):
        decoded = rows.cast_column("video", feature)
        for row in (decoded[0], undecoded[0], next(iter(decoded.to_iterable_dataset()))):
            frames, metadata = load_video(ref("video", row["video"], nframes=4))
            assert shown(frames) == metadata["frames_indices"] == [0, 5, 10, 15]


def test_frames_are_a_video(tmp_path):
    pixels = np.stack([frame(i) for i in range(4)])
    paths = []
    for i, image in enumerate(pixels):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(image).save(paths[-1])
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    for source in (pixels, list(pixels), [Image.fromarray(f) for f in pixels], paths, tensor, pixels.tolist()):
        frames, metadata = load_video(ref("video", source, sample_fps=2.0))
        np.testing.assert_array_equal(frames, pixels)
        assert metadata == {"total_num_frames": 4, "fps": 2.0, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}
    assert load_video(ref("video", paths, fps=4.0))[1]["duration"] == 1.0
    assert load_video(ref("video", paths))[1]["fps"] is None


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.mp4", {}, "row 3, column 'video': no such file: '"),
        ("/", {}, "row 3, column 'video': '/' is a folder; give the list of the files of its frames"),
        (
            b"not a video",
            {},
            "row 3, column 'video': this isn't a readable video file: it starts with b'not a v",
        ),
        ([frame(0)], {"fps": 0}, "row 3, column 'video': 'fps' is 0; set the frames per second"),
        ([frame(0)], {"nframes": 1}, "row 3, column 'video': nframes has no effect on a list of frames"),
        ("v.mp4", {"sample_fps": 2.0}, "row 3, column 'video': 'sample_fps' is the rate of a list of frames; give"),
        ([], {}, "row 3, column 'video': 0 of 0 selected frames"),
        ([frame(0), frame(1)[:32]], {}, "row 3, column 'video': the frames have different sizes; resize them"),
        ([frame(0), "missing.png"], {}, "row 3, column 'video[1]': no such file: '"),
        ("v.mp4", {"fps": 2, "nframes": 4}, "row 3, column 'video': has both 'fps' and 'nframes'; set one of them"),
        (
            "v.mp4",
            {"video_start": 5.0},
            "row 3, column 'video': no frame lies between 5.0 s and inf s: the video has 20",
        ),
        ("v.mp4", {"nframes": 21}, "row 3, column 'video': cannot read this video '"),
    ],
)
def test_unusable_videos_are_named(folder, decoder, source, options, message):
    source = folder / source if source == "v.mp4" else source
    with pytest.raises(MediaError) as error:
        load_video(ref("video", source, **options))
    assert str(error.value).startswith(message)


def test_videos_without_a_chosen_frame_or_their_end_are_named(folder, tmp_path, decoder):
    with pytest.raises(MediaError, match="row 3, column 'video': (2 of 3 selected frames|cannot read)"):
        load_video(ref("video", folder / "v.mp4"), lambda metadata: [18, 19, 20])
    data = all_frames(mux={"movflags": "faststart"}, path=tmp_path / "v.mp4", options={"crf": "10"})
    with pytest.raises(MediaError, match="row 3, column 'video': the file is damaged or cut off: .* of .* bytes"):
        load_video(ref("video", data[: len(data) * 3 // 4]))


@pytest.mark.parametrize(
    ("name", "codec", "fps"),
    [
        ("matroska", "libx264", 10),
        ("webm", "libvpx-vp9", 10),
        ("avi", "mpeg4", 10),
        ("mpegts", "libx264", 10),
        ("mpegts", "mpeg4", 10),
        ("mpeg", "mpeg2video", 25),
        ("asf", "mpeg1video", 25),
        ("flv", "libx264", 10),
        ("h264", "libx264", 10),
    ],
)
def test_frames_are_those_of_their_numbers(name, codec, fps, decoder):
    """Also covers files without the number or positions of frames, in which seeking reaches other frames."""
    data = all_frames(name, codec, fps, gop_size=6, max_b_frames=2, bit_rate=2_000_000)
    frames, metadata = load_video(ref("video", data))
    assert shown(frames) == list(range(FRAMES)) and metadata["fps"] == pytest.approx(fps)
    for chosen in ([0, 5, 10, 15], [7], [1, 18, 19]):
        assert np.array_equal(load_video(ref("video", data), lambda metadata: chosen)[0], frames[chosen])  # noqa: B023


# From a keyframe, with an edit list, with pictures before it, and from behind a keyframe
STARTS = [(0, 0), (0, 5), (0, -3), (2, 4)]


@pytest.mark.parametrize(
    ("start", "hidden", "codec", "container"),
    by_turns([(*s, c) for c, s in product(("H.264", "H.264, open groups", "HEVC"), STARTS)], ["mp4", "matroska"]),
)
def test_clips_cut_without_encoding_show_what_ffmpeg_shows(start, hidden, codec, container, decoder):
    if clips.CODECS[codec][0] not in av.codecs_available:
        pytest.skip("PyAV has no encoder of it")
    data = clips.trimmed(clips.encoded(codec), start, hidden, container)
    expected = clips.shown(data)
    assert 30 < len(expected) < clips.FRAMES
    frames, metadata = load_video(ref("video", data))
    np.testing.assert_array_equal(frames, expected)
    assert metadata["total_num_frames"] == len(expected) and metadata["fps"] == pytest.approx(clips.RATE)
    assert media_size(ref("video", data))["frames"] == len(expected)
    for chosen in ([0, 10, 21], [21], [len(expected) - 1]):
        found = load_video(ref("video", data), lambda metadata: chosen)[0]  # noqa: B023
        np.testing.assert_array_equal(found, expected[chosen])
    size = {"resized_height": 56, "resized_width": 84}
    sampled, metadata = load_by_qwen(ref("video", data, **size), 14)
    chosen = metadata["frames_indices"]
    assert len(chosen) >= 6 and chosen[-1] == len(expected) - 1
    stills = load_by_qwen(ref("video", expected[chosen], **size), 14)[0]
    assert torch.equal(sampled, stills)


@pytest.mark.parametrize(("codec", "container"), by_turns(clips.CODECS, ["mp4", "matroska"]))
def test_frames_are_whole_whichever_is_asked_for(codec, container, decoder):
    """Also covers keyframes with gradual refresh."""
    if clips.CODECS[codec][0] not in av.codecs_available:
        pytest.skip("PyAV has no encoder of it")
    data = clips.encoded(codec, container)
    expected = clips.shown(data)
    for chosen in (list(range(60)), [0, 10, 21], [14, 25, 59], *([i] for i in range(12, 60, 3))):
        found = load_video(ref("video", data), lambda metadata: chosen)[0]  # noqa: B023
        np.testing.assert_array_equal(found, expected[chosen])


MATRICES = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]
MATRICES += [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)]  # as in a mirror


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_frames_are_shown_as_their_matrix_says(matrix, decoder):
    """As ISO 14496-12 has it, a pixel at (x, y) is shown at (a x + c y, b x + d y)."""
    a, b, c, d = matrix
    data = clips.encoded("H.264")
    stored = clips.shown(data)[[0, 20, 40]]
    y, x = np.mgrid[: clips.HEIGHT, : clips.WIDTH]
    across = a * x + c * y
    down = b * x + d * y
    across = across - across.min()
    down = down - down.min()
    expected = np.zeros((3, down.max() + 1, across.max() + 1, 3), np.uint8)
    expected[:, down, across] = stored
    np.testing.assert_array_equal(load_video(ref("video", clips.placed(data, matrix), nframes=3))[0], expected)


def videos(sizes, name, default=None):
    """A file with a video of each size, of which the number is the brightness."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name) as container:
        streams = [container.add_stream("mpeg4", rate=10, width=width, height=height) for width, height in sizes]
        for number, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default.value if number == default else 0
        for _ in range(8):
            for number, stream in enumerate(streams):
                picture = np.full((stream.height, stream.width, 3), 60 * number + 40, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        for stream in streams:
            container.mux(stream.encode())
    return buffer.getvalue()


SMALL = (32, 32)
LARGE = (96, 64)


SEVERAL = [((SMALL, LARGE), 1), ((LARGE, SMALL), 0), ((SMALL, LARGE, LARGE), 1), ((SMALL, (64, 96), SMALL), 1)]
SEVERAL = [(name, *each, None) for name, each in product(("matroska", "mpegts", "avi"), SEVERAL)]


@pytest.mark.parametrize(("name", "sizes", "chosen", "default"), [*SEVERAL, ("matroska", (LARGE, SMALL), 1, 1)])
def test_the_largest_of_several_videos_is_shown(name, sizes, chosen, default, decoder):
    """The program `ffmpeg` takes most pixels, and before them a stream that its file marks as the default."""
    frames, metadata = load_video(ref("video", videos(sizes, name, default)))
    assert frames.shape == (8, *sizes[chosen][::-1], 3) and metadata["total_num_frames"] == 8
    assert abs(float(frames.mean()) - 60 * chosen - 40) < 4


@needs_torchcodec
def test_a_decoder_that_finds_other_frames_is_named():
    from torchcodec.decoders import VideoDecoder

    data = clips.trimmed(clips.encoded("H.264, intra refresh"), 0, 0)
    with pytest.raises(MediaError, match="its decoder returns frames whose times don't increase; give the file"):
        load_video(ref("video", VideoDecoder(data)), lambda metadata: [0, 5, 10])


def test_missing_video_libraries_are_named(folder, monkeypatch):
    monkeypatch.setattr(decoding, "is_torchcodec_usable", lambda: False)
    for module, load in (("qwen_vl_utils", lambda r: load_by_qwen(r, 14)), ("av", load_video)):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, "qwen_vl_utils.vision_process", raising=False)
        with pytest.raises(ImportError, match=rf'{module} .*pip install "trl-multimodal-rft\[video\]"'):
            load(ref("video", folder / "v.mp4"))


# qwen-vl-utils


QWEN_OPTIONS = [
    {},
    {"fps": 4.0},
    {"nframes": 6, "video_start": 0.35, "video_end": 1.5},
    {"min_frames": 8, "max_frames": 12, "fps": 1.0},
    {"min_pixels": 1000, "max_pixels": 20000},
    {"min_pixels": 1000, "total_pixels": 8000},
    {"min_pixels": 1000, "total_pixels": 8000, "max_pixels": 6000},
    {"min_pixels": 6000, "total_pixels": 100},
    {"resized_height": 90, "resized_width": 130},
]


@needs_torchcodec
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("options", QWEN_OPTIONS, ids=str)
def test_videos_are_those_of_qwen_vl_utils(folder, patch, options):
    from qwen_vl_utils.vision_process import fetch_video

    path = str(folder / "v.mp4")
    expected, about = fetch_video({"video": path, **options}, image_patch_size=patch, return_video_metadata=True)
    for source in (path, (folder / "v.mp4").read_bytes()):
        frames, metadata = load_by_qwen(ref("video", source, **options), patch)
        assert torch.equal(frames, expected)
        assert metadata["frames_indices"] == about["frames_indices"]
        assert (metadata["total_num_frames"], metadata["fps"]) == (about["total_num_frames"], about["fps"])


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("options", [{}, {"max_pixels": 10000}, {"resized_height": 90, "resized_width": 130}], ids=str)
def test_images_are_those_of_qwen_vl_utils(tmp_path, patch, options):
    from qwen_vl_utils import process_vision_info

    Image.fromarray(chats.mosaic(1, 120, 200, 0)[0]).save(tmp_path / "i.png")
    block = {"type": "image", "image": str(tmp_path / "i.png"), **options}
    (expected,), _ = process_vision_info([{"role": "user", "content": [block]}], image_patch_size=patch)
    image = load_by_qwen(ref("image", tmp_path / "i.png", **options), patch)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def qwen_inputs(processor, messages, metadata):
    options = {"do_resize": False, "do_sample_frames": False, "video_metadata": metadata}
    return processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
    )


QWEN = {"qwen2_5_vl": (lambda: families.qwen2_5_vl()[1], 14), "qwen3_vl": (families.qwen3_vl_processor, 16)}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_processors_neither_resize_nor_sample_again(folder, decoder, name):
    processor = QWEN[name][0]()
    patch = QWEN[name][1]
    picture = ref("image", chats.mosaic(1, 120, 200, 0)[0], min_pixels=3136, max_pixels=20000)
    clip = ref("video", folder / "v.mp4", nframes=6, video_start=0.5, video_end=1.5, max_pixels=60000, min_pixels=3136)
    image = load_by_qwen(picture, patch)
    frames, metadata = load_by_qwen(clip, patch)
    assert metadata["frames_indices"] == [5, 7, 9, 11, 13, 15]
    blocks = [{"type": "image", "image": image}, {"type": "video", "video": frames}]
    inputs = qwen_inputs(processor, [{"role": "user", "content": blocks}], [metadata])
    assert inputs["image_grid_thw"].tolist() == [[1, image.height // patch, image.width // patch]]
    assert inputs["video_grid_thw"].tolist() == [[3, frames.shape[2] // patch, frames.shape[3] // patch]]
    if name == "qwen2_5_vl":
        assert inputs["second_per_grid_ts"].tolist() == pytest.approx([2 * 11 / 10 / 6])  # 6 frames of 1.1 s
    else:
        words = processor.decode(inputs["input_ids"][0])
        assert [f"<{t} seconds>" in words for t in ("0.6", "1.0", "1.4")] == [True] * 3
        again = qwen_inputs(processor, [{"role": "user", "content": blocks}], [{**metadata, "fps": 2 * FPS}])
        assert "<0.5 seconds>" in processor.decode(again["input_ids"][0])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_processors_take_frames_with_their_rate(name):
    processor = QWEN[name][0]()
    patch = QWEN[name][1]
    pictures = [Image.fromarray(frame(i)) for i in range(5)]
    frames, metadata = load_by_qwen(ref("video", pictures, sample_fps=0.5), patch)
    assert frames.shape[0] == 5
    assert abs(frames.shape[3] / frames.shape[2] - WIDTH / HEIGHT) < 0.11  # one token of width
    inputs = qwen_inputs(processor, [{"role": "user", "content": [{"type": "video", "video": frames}]}], [metadata])
    assert inputs["video_grid_thw"][0, 0] == 3
    if name == "qwen2_5_vl":
        assert inputs["second_per_grid_ts"].tolist() == [4.0]
    else:
        words = processor.decode(inputs["input_ids"][0])
        assert [f"<{t} seconds>" in words for t in ("1.0", "5.0", "8.0")] == [True] * 3
    _, unknown = decode_media([ref("video", pictures, max_pixels=60000)], processor, "raise")
    assert unknown["videos_kwargs"]["video_metadata"][0][0]["fps"] == 2.0


@pytest.mark.parametrize("options", [{"fps": 2, "nframes": 4}, {"nframes": 40}, {"video_start": 9.0}], ids=str)
def test_impossible_qwen_options_are_named(folder, decoder, options):
    with pytest.raises(MediaError, match="row 3, column 'video': cannot read this video"):
        load_by_qwen(ref("video", folder / "v.mp4", **options), 14)
