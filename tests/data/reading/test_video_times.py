# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Frames of videos have the times that FFmpeg gives them, in spans and in prompts; too few frames are named."""

import io
import re
from fractions import Fraction

import av
import datasets
import numpy as np
import pytest
from helpers import families
from helpers.files import decoder, load_by_qwen, ref  # noqa: F401
from helpers.trainer_utils import run

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.data.reading.decoding import load_video
from trl_multimodal_rft.data.reading.media_files import evenly_spaced_frames
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.versions import is_torchcodec_usable


# First 20 frames a second, then 2.5; the other way round; a still picture, then a movement; one frame left out
UNEVEN = {
    "slower": [i / 20 for i in range(40)] + [2 + i / 2.5 for i in range(20)],
    "faster": [i / 2.5 for i in range(20)] + [8 + i / 20 for i in range(40)],
    "still": [0.0, 5.0] + [6 + i / 10 for i in range(38)],
    "three lost": [i / 10 for i in range(63) if i not in (20, 21, 22)],
}
EVEN = [i / 10 for i in range(40)]


def video(times, container="matroska", rate=10, start=0.0, **options) -> bytes:
    """A video whose frame `i` has the brightness `4 * i` and is shown at `start + times[i]` seconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("libx264", rate=rate, width=64, height=64)
        stream.pix_fmt = "yuv444p"
        stream.options = {"crf": "0", **options}
        stream.codec_context.time_base = Fraction(1, 1000)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 4 * i, np.uint8))
            frame.pts = round((start + time) * 1000)
            frame.time_base = Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def by_ffmpeg(data: bytes) -> list[float]:
    """Times of all frames from the first one on, as FFmpeg decodes them."""
    with av.open(io.BytesIO(data)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    return [time - times[0] for time in times]


def shown(frames) -> list[int]:
    return [round(float(frame.mean()) / 4) for frame in frames]


def told(metadata) -> list[float]:
    return [index / metadata["fps"] for index in metadata["frames_indices"]]


FILES = [("matroska", {}), ("mp4", {"bf": "2"}), ("mp4", {"start": 1.5}), ("mpegts", {})]


@pytest.mark.parametrize(("container", "options"), FILES)
@pytest.mark.parametrize("name", UNEVEN)
def test_times_are_those_of_ffmpeg(name, container, options, decoder):  # noqa: F811
    data = video(UNEVEN[name], container, **options)
    times = by_ffmpeg(data)
    assert len(times) == len(UNEVEN[name]) and times == pytest.approx(UNEVEN[name], abs=2e-3)
    frames, metadata = load_video(ref("video", data))
    assert shown(frames) == [*range(len(times))] and told(metadata) == pytest.approx(times, abs=2e-3)
    for start, end in ((4.0, 6.0), (0.0, 3.0), (5.0, 99.0)):
        inside = [i for i, time in enumerate(times) if start - 2e-3 <= time <= end + 2e-3]
        span = {"video_start": start, "video_end": end}
        frames, metadata = load_video(ref("video", data, **span))
        assert shown(frames) == inside and told(metadata) == pytest.approx([times[i] for i in inside], abs=2e-3)
        few = frames
        of_few = metadata
        if len(inside) > 2:
            few, of_few = load_video(ref("video", data, nframes=3, **span))
        assert {*shown(few)} <= {*inside} and told(of_few) == pytest.approx([times[i] for i in shown(few)], abs=2e-3)
        # As many frames a second as of the span's seconds
        seconds = min(end, times[-1]) - start
        rate = metadata["fps"] * len(few) / metadata["total_num_frames"]
        assert rate == pytest.approx(len(few) / seconds, rel=0.25)


def test_spans_of_qwen(decoder):  # noqa: F811
    times = UNEVEN["slower"]
    frames, metadata = load_by_qwen(ref("video", video(times), video_start=4.0, video_end=8.0, nframes=6), 14)
    assert told(metadata) == pytest.approx([4.0, 4.8, 5.6, 6.4, 7.2, 8.0])
    frames, metadata = load_by_qwen(ref("video", video(times), video_start=4.0, video_end=8.0, fps=1.0), 14)
    assert told(metadata) == pytest.approx([4.0, 5.2, 6.8, 8.0]) and len(frames) == 4  # of 4 s


def test_prompt_tells_the_times(tmp_path, decoder):  # noqa: F811
    """Frames 0, 8, 17, 25, 34, 42, 51 and 59 in pairs."""
    (tmp_path / "v.mkv").write_bytes(video(UNEVEN["slower"]))
    model, processor = families.ALL_FAMILIES["qwen3_vl"].build()
    block = {"type": "video", "video": ref("video", str(tmp_path / "v.mkv"), nframes=8)}
    prompt = encode_prompt([{"role": "user", "content": [block]}], processor, model)
    text = processor.tokenizer.decode(prompt.input_ids)
    seconds = [float(match) for match in re.findall(r"<([\d.]+) seconds>", text)]
    assert seconds == pytest.approx([0.2, 1.05, 2.25, 8.0], abs=0.051)  # with one decimal


@pytest.mark.skipif(not is_torchcodec_usable(), reason="torchcodec or the FFmpeg it needs can't be loaded")
def test_decoders_have_the_times_of_the_frames_that_they_read(tmp_path):
    (tmp_path / "v.mkv").write_bytes(video(UNEVEN["slower"]))
    rows = datasets.Dataset.from_dict({"video": [str(tmp_path / "v.mkv")]}).cast_column("video", datasets.Video())
    column = rows.with_format("torch")[0]["video"]
    frames, metadata = load_video(ref("video", column, nframes=4))
    assert told(metadata) == pytest.approx([UNEVEN["slower"][i] for i in shown(frames)], abs=2e-3)
    with pytest.raises(MediaError, match="its frame rate varies, so a decoder doesn't find the frames of"):
        load_video(ref("video", column, video_start=4.0, video_end=8.0))


def test_rates_that_a_header_states_wrongly(decoder):  # noqa: F811
    data = video(EVEN, rate=25)
    frames, metadata = load_video(ref("video", data, video_start=1.0, video_end=2.0))
    assert shown(frames) == [*range(10, 21)] and metadata["fps"] == pytest.approx(10, rel=0.03)
    assert all(isinstance(index, int) for index in metadata["frames_indices"])


def test_a_span_without_a_frame_has_the_one_that_is_shown(decoder):  # noqa: F811
    data = video(UNEVEN["still"])
    frames, metadata = load_video(ref("video", data, video_start=2.0, video_end=4.0))
    assert shown(frames) == [0] and told(metadata) == [0.0]
    with pytest.raises(MediaError, match="no frame lies between 50.0 s and 60.0 s"):
        load_video(ref("video", data, video_start=50.0, video_end=60.0))


def test_clips_of_judges_last_as_long():
    frames, metadata = evenly_spaced_frames(ref("video", video(UNEVEN["slower"]), video_start=4.0, video_end=8.0), 4)
    assert len(frames) / (metadata["fps"] * len(frames) / metadata["total_num_frames"]) == pytest.approx(4.0)


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_files_train_with_their_times(family, tmp_path):
    """The self-check compares no times with those of a processor that reads the file at a constant rate."""
    (tmp_path / "v.mp4").write_bytes(video(UNEVEN["still"], "mp4"))
    rows = datasets.Dataset.from_list([{"prompt": "What happens?", "video": str(tmp_path / "v.mp4")}] * 8)
    run(MultimodalGRPOTrainer, family, rows, max_steps=1, self_check=True)


# Few frames

ONE = video([0.0], "mp4")
TEN = video(EVEN[:10], "mp4")
FEW = {
    "file": (ONE, {}, "the video has 1 frame, and {} needs 2; give an image"),
    "span": (
        TEN,
        {"video_start": 0.45, "video_end": 0.55},
        "the span has 1 frame, and {} needs 2; give a longer span, or an image",
    ),
    "option": (TEN, {"nframes": 1}, "'nframes' of 1 is less than the 2 frames of a token; raise it"),
    "list": (np.zeros((1, 56, 56, 3), np.uint8), {}, "the video has 1 frame, and {} needs 2; give an image"),
}
PADDED = ("qwen2_5_vl", "list")  # the processor repeats the frame


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v", "internvl"])
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("is_path", [False, True])
def test_too_few_frames_are_named(family, kind, is_path, tmp_path):
    source, options, message = FEW[kind]
    if is_path and isinstance(source, bytes):
        (tmp_path / "v.mp4").write_bytes(source)
        source = str(tmp_path / "v.mp4")
    model, processor = families.ALL_FAMILIES[family].build()
    prompt = [{"role": "user", "content": [{"type": "video", "video": ref("video", source, **options)}]}]
    if family == "internvl" or (family, kind) == PADDED:
        assert len(encode_prompt(prompt, processor, model)) > 4
        return
    with pytest.raises(MediaError) as error:
        encode_prompt(prompt, processor, model)
    assert str(error.value).endswith(message.format(type(processor).__name__))
