# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The table of completions with its media: the written media equal the dataset's, once per prompt."""

import hashlib
import io
import json
import logging
import subprocess
import weakref
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import PIL.Image
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from datasets import Audio, Dataset, Features, Image, List, Value, Video, load_dataset
from helpers import forked
from helpers.chats import RATE, image, video
from helpers.files import ref, video_file
from helpers.folders import TESTS
from helpers.media_logs_worker import dataset as mixed_dataset
from helpers.media_logs_worker import mixed_rows
from helpers.processes import python_command, python_environment
from helpers.trainer_utils import (
    InjectedOurs,
    InjectedTRL,
    audio_rows,
    image_rows,
    images_rows,
    make_trainer,
    run,
    sound,
    text_rows,
    video_rows,
    with_media,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.reading.decoding import load_image, load_video
from trl_multimodal_rft.data.reading.media_files import media_file
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding import media as encoding
from trl_multimodal_rft.reporting import media_logs
from trl_multimodal_rft.reporting.media_logs import write_parquet


ROWS = {"audio": audio_rows, "image": image_rows, "images": images_rows, "video": video_rows}
FAMILY = {"audio": "qwen2_audio", "image": "qwen2_5_vl", "images": "qwen2_5_vl", "video": "qwen2_5_vl"}
LOGGED = {"log_completions": True, "num_completions_to_print": 0}
HALF_STEP = 2.0**-16  # half a 16-bit step


def train(kind, folder, trainer_class=InjectedOurs, rows=None, **options):
    rows = ROWS[kind]() if rows is None else rows
    trainer = make_trainer(trainer_class, FAMILY.get(kind, kind), rows, folder, **{**LOGGED, **options})
    trainer.train()
    return trainer


def table(folder, step):
    path = folder / "_private" / "completions" / f"completions_{step:05d}.parquet"
    return load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def samples(decoder) -> np.ndarray:
    return decoder.get_all_samples().data[0].numpy()


def pixels(frames) -> np.ndarray:
    return frames.get_all_frames().data.permute(0, 2, 3, 1).numpy().astype(int)


def assert_same(kind: str, logged, source) -> None:
    """Asserts that a column's media equal the row's bit for bit, except for the codec of videos."""
    if kind == "audio":
        assert logged.metadata.sample_rate == source["sampling_rate"]
        assert np.abs(samples(logged) - source["array"]).max() <= HALF_STEP
    elif kind == "video":
        frames = pixels(logged)
        assert frames.shape == source.shape
        # The mosaics of the tests have sharp edges between colours, unlike other frames
        assert np.abs(frames - source).mean() < 20 < np.abs(frames - source[::-1]).mean()
    else:
        assert np.array_equal(np.asarray(logged), np.asarray(source))


def index_of(row) -> int:
    """Returns the index of the row, with which its prompt ends."""
    return int(row["prompt"][-1]["content"].split()[-1])


# Parquet


@pytest.mark.parametrize(
    ("trainer_class", "kind"),
    [
        (InjectedOurs, "audio"),
        (InjectedOurs, "image"),
        (InjectedOurs, "images"),
        (InjectedOurs, "video"),
        (MultimodalRLOOTrainer, "audio"),
        (MultimodalRLOOTrainer, "images"),
        (MultimodalPPOTrainer, "audio"),
        (MultimodalPPOTrainer, "video"),
    ],
)
def test_parquet_gives_the_media_back(trainer_class, kind, tmp_path):
    sources = ROWS[kind]()
    train(kind, tmp_path, trainer_class, sources, num_generations=4)
    features = {"audio": Audio(), "image": Image(), "images": List(Image()), "video": Video()}
    for step in (1, 2):
        rows = table(tmp_path, step)
        assert rows.column_names == ["step", "prompt", "completion", "length_and_sum", "advantage", kind]
        assert rows.features[kind] == features[kind]
        assert len(rows) == 8 and rows["step"][:] == [step] * 8
        for i, row in enumerate(rows):
            source = sources[index_of(row)][kind]
            if i % 4 > 0:
                assert row[kind] is None
            elif kind == "images":
                assert len(row[kind]) == len(source)
                for logged, each in zip(row[kind], source, strict=True):
                    assert_same("image", logged, each)
            else:
                assert_same(kind, row[kind], source)
            assert row["prompt"][0]["content"].startswith(f"<{kind.removesuffix('s')}>")
            assert isinstance(row["advantage"], float) and isinstance(row["length_and_sum"], float)


def test_other_columns_are_those_of_trl(tmp_path):
    """The baseline is TRL's trainer, also for columns from reward functions, and rewards that don't apply."""

    def reward(completion_ids, log_extra, **kwargs):
        log_extra("last", [ids[-1] for ids in completion_ids])
        return [None if len(ids) == 8 else len(ids) / 3 for ids in completion_ids]

    frames = {}
    for name, trainer_class in {"theirs": InjectedTRL, "ours": InjectedOurs}.items():
        train("qwen2_5_vl", tmp_path / name, trainer_class, text_rows(), reward=reward)
        folder = tmp_path / name if name == "theirs" else tmp_path / name / "_private"
        paths = sorted((folder / "completions").iterdir())
        assert [path.name for path in paths] == ["completions_00001.parquet", "completions_00002.parquet"]
        frames[name] = pd.concat([pd.read_parquet(path) for path in paths])
    assert frames["theirs"]["reward"].isna().any() and frames["theirs"]["reward"].notna().any()
    exact = frames["ours"].drop(columns="advantage"), frames["theirs"].drop(columns="advantage")
    pd.testing.assert_frame_equal(*exact)
    pd.testing.assert_series_equal(frames["ours"]["advantage"], frames["theirs"]["advantage"], atol=1e-5)


def test_all_files_load_together(tmp_path):
    """A step without images has the images column, too."""
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "shuffle_dataset": False}
    train("qwen2_5_omni", tmp_path, rows=mixed_dataset(), **options)
    files = str(tmp_path / "_private" / "completions" / "*.parquet")
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    features = rows.features["audio"], rows.features["images"], rows.features["video"]
    assert features == (Audio(), List(Image()), Video())
    held = [{key for key in ("audio", "images", "video") if row[key] is not None} for row in rows]
    assert held == [{"audio"}, *[set()] * 3, {"images"}, *[set()] * 3, {"video"}, *[set()] * 7]


def test_media_in_the_messages(tmp_path):
    pictures = [image(84, 56, seed=i)["image"] for i in range(8)]
    sounds = [sound(0.3, seed=i) for i in range(8)]

    def prompt(i):
        blocks = [{"type": "image", "image": pictures[i]}, {"type": "audio", "audio": sounds[i]}]
        return [{"role": "user", "content": [*blocks, {"type": "text", "text": f"Are they alike? {i}"}]}]

    indices = Dataset.from_dict({"index": list(range(8))})
    rows = indices.with_transform(lambda batch: {"prompt": [prompt(i) for i in batch["index"]]})
    train("qwen2_5_omni", tmp_path, rows=rows, max_steps=1)
    rows = table(tmp_path, 1)
    assert rows.features["images"] == List(Image()) and rows.features["audios"] == List(Audio())
    for row in (rows[0], rows[4]):
        (picture,) = row["images"]
        (heard,) = row["audios"]
        assert_same("image", picture, pictures[index_of(row)])
        assert_same("audio", heard, sounds[index_of(row)])
        assert row["prompt"][0]["content"].startswith("<image><audio>Are")


def test_a_reward_keeps_its_name(tmp_path):
    def image(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    train("image", tmp_path, reward=image, max_steps=1)
    rows = table(tmp_path, 1)
    assert rows.features["image"] == Value("float64") and rows.features["prompt_image"] == Image()
    assert rows[0]["prompt_image"] is not None


def test_evaluation_logs_its_own(tmp_path):
    objects = {"eval_dataset": ROWS["audio"](2)}
    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "max_steps": 2}
    train("audio", tmp_path, objects=objects, **options)
    rows = table(tmp_path, 2)
    sources = ROWS["audio"](2)
    assert [index_of(row) for row in rows] == [0] * 4 + [1] * 4
    for i, row in enumerate(rows):
        assert (row["audio"] is None) == (i % 4 > 0)
    assert_same("audio", rows[4]["audio"], sources[1]["audio"])


# Encoding

PICTURE = image(84, 56, seed=1)["image"]
CLIP = video(6, 84, 56, seed=2)["video"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    samples = sound(0.5, seed=3)["array"]
    for name in ("wav", "flac", "ogg", "mp3", "aiff"):
        soundfile.write(folder / f"audio.{name}", samples, RATE)
    for name in ("png", "jpg", "webp", "gif", "tiff"):
        PICTURE.save(folder / f"image.{name}", **({"lossless": True} if name == "webp" else {}))
    for name, codec, form in (
        ("mp4", "libx264", "mp4"),
        ("webm", "libvpx", "webm"),
        ("avi", "mpeg4", "avi"),
        ("mkv", "libx264", "matroska"),
    ):
        (folder / f"video.{name}").write_bytes(video_file(CLIP, form, codec, rate=2))
    return folder


OWN = ["audio.wav", "audio.flac", "audio.ogg", "audio.mp3", "image.png", "image.jpg", "image.webp", "image.gif"]


@pytest.mark.parametrize("name", [*OWN, "video.mp4", "video.webm"])
def test_a_file_stays_as_it_is(name, files):
    kind, suffix = name.split(".")
    path = files / name
    data = path.read_bytes()
    sources = [
        str(path),
        path,
        data,
        {"path": str(path), "bytes": None},
        {"bytes": data, "path": "x"},
        f"file://{path}",
    ]
    feature = {"image": Image(), "audio": Audio(), "video": Video()}[kind]
    sources.append(Dataset.from_dict({kind: [str(path)]}).cast_column(kind, feature)[0][kind])
    for source in sources[: -1 if kind == "image" else None]:  # PIL images have no file
        logged = media_file(ref(kind, source), 1e9)
        assert (logged.modality, logged.data, logged.suffix) == (kind, data, suffix)


def test_other_files_are_encoded(files):
    logged = media_file(ref("image", str(files / "image.tiff")), 1e9)
    assert logged.suffix == "png" and np.array_equal(PIL.Image.open(io.BytesIO(logged.data)), PICTURE)
    logged = media_file(ref("audio", str(files / "audio.aiff")), 1e9)
    assert logged.suffix == "wav"
    heard, rate = soundfile.read(io.BytesIO(logged.data))
    expected, _ = soundfile.read(files / "audio.aiff")
    assert rate == RATE and np.abs(heard - expected).max() == 0
    for name in ("video.avi", "video.mkv"):
        logged = media_file(ref("video", str(files / name)), 1e9)
        assert logged.suffix == "mp4"
        shown, metadata = load_video(logged.ref())
        assert shown.shape == CLIP.shape and metadata["fps"] == 2
        assert np.abs(shown.astype(int) - CLIP).mean() < 20


@pytest.mark.parametrize("rate", [RATE, 8000, 44100])
def test_sounds_keep_their_rate(rate):
    integers = (sound(0.2)["array"] * 2**15).astype(np.int16)
    stereo = np.stack([integers, np.zeros_like(integers)])
    for source, expected in (
        ({"array": integers, "sampling_rate": rate}, integers),
        ((torch.tensor(integers), rate), integers),
        ({"array": integers.astype(np.float32) / 2**15, "sampling_rate": rate}, integers),
        ({"array": stereo, "sampling_rate": rate}, (integers / 2).round()),
        ({"array": np.float32([3, -3]), "sampling_rate": rate}, [2**15 - 1, -(2**15)]),
    ):
        heard, found = soundfile.read(io.BytesIO(media_file(ref("audio", source), 1e9).data), dtype="int16")
        assert found == rate and np.array_equal(heard, expected)


def test_frames_of_odd_size_are_padded_and_long_videos_thinned():
    clip = np.full((3, 57, 85, 3), 200, dtype=np.uint8)
    shown, metadata = load_video(media_file(ref("video", clip, fps=5), 1e9).ref())
    assert shown.shape == (3, 58, 86, 3) and metadata["fps"] == 5
    assert np.abs(shown.astype(int) - 200).max() <= 3
    clip = np.repeat(np.arange(200, dtype=np.uint8)[:, None, None, None], 16, 1).repeat(16, 2).repeat(3, 3)
    data = video_file(clip, "avi", "mpeg4", rate=2)
    shown, metadata = load_video(media_file(ref("video", data), 1e9).ref())
    assert len(shown) == 64
    assert metadata["duration"] == pytest.approx(100, rel=0.02)  # seconds
    expected = np.linspace(0, 199, 64)
    assert np.abs(shown.mean(axis=(1, 2, 3)) - expected).max() < 8


def test_a_span_is_cut_out(files):
    """The span has frames 2 to 4 of 6, at two per second."""
    source = ref("video", str(files / "video.mp4"), video_start=1.0, video_end=2.0)
    logged = media_file(source, 1e9)
    assert logged.data != (files / "video.mp4").read_bytes()
    shown, metadata = load_video(logged.ref())
    whole, _ = load_video(ref("video", str(files / "video.mp4")))
    assert shown.shape == whole[2:5].shape and metadata["fps"] == 2
    differences = [[np.abs(a.astype(int) - b).mean() for b in whole] for a in shown]
    assert np.argmin(differences, axis=1).tolist() == [2, 3, 4]


def test_what_is_too_large_or_broken_is_an_error(files):
    size = (files / "audio.flac").stat().st_size
    assert media_file(ref("audio", str(files / "audio.flac")), size).suffix == "flac"
    with pytest.raises(MediaError, match="row 3, column 'audio': .* too much to log"):
        media_file(ref("audio", str(files / "audio.flac")), size - 1)
    with pytest.raises(MediaError, match="row 3, column 'image': .*; repair it or remove the row"):
        media_file(ref("image", b"no image"), 1e9)


def test_parquet_without_rows_that_hold_media(tmp_path):
    frame = pd.DataFrame({"prompt": ["a", "b"]})
    write_parquet(frame, [{}, {}], tmp_path / "new" / "t.parquet", columns=["solution", "images"])
    assert pd.read_parquet(tmp_path / "new" / "t.parquet")["images"].isna().all()
    schema = pq.read_schema(tmp_path / "new" / "t.parquet")
    features = Features.from_arrow_schema(schema)
    assert list(features) == ["prompt", "images"] and features["images"] == List(Image())


# Boards


def launch(mode, folder, processes=1):
    environment = {
        "TRACKIO_DIR": str(folder / "trackio"),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "ACCELERATE_USE_CPU": "true",
        **{f"WANDB_{name}": str(folder / "wandb") for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR")},
    }
    command = python_command([TESTS / "helpers" / "media_logs_worker.py", mode, folder], processes)
    environment = python_environment(**environment)
    # trackio reads the name of its folder on import
    run = partial(subprocess.run, text=True) if mode == "boards" else forked.run
    result = run(command, env=environment, capture_output=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """The folder of a run of two steps with four prompts each: with a sound, images, a video, and text alone."""
    folder = tmp_path_factory.mktemp("boards")
    launch("boards", folder)
    return folder


def assert_close(shown, source):
    """Compares frames of a video, which its codec changed."""
    assert shown.shape == source.shape
    assert np.abs(shown.astype(int) - source.astype(int)).mean() < 20


def shown_as(picture) -> np.ndarray:
    return np.asarray(PIL.Image.open(picture).convert("RGB"))


def assert_shown(step, heard, pictures):
    """Compares a sound and pictures with those of the step's rows. Returns the clip."""
    audio, images, clip = (mixed_rows()[4 * (step - 1) + i][k] for i, k in enumerate(("audio", "images", "video")))
    samples, rate = soundfile.read(heard)
    assert rate == audio["sampling_rate"] and np.abs(samples - audio["array"]).max() <= 1e-4
    for shown, picture in zip(pictures, images, strict=True):
        assert np.array_equal(shown_as(shown), picture)
    return clip


@pytest.mark.slow
def test_trackio(boards):
    logs = json.loads((boards / "trackio.json").read_text())
    tables = [entry for entry in logs if "completions" in entry]
    assert len(tables) == 2  # training doesn't end with a third
    media = boards / "trackio" / "media"
    for step, entry in enumerate(tables, 1):
        rows = entry["completions"]["_value"]
        assert len(rows) == 16 and {row["step"] for row in rows} == {step}
        tags = ["<audio>", "<image>" * step, "<video>", ""]
        assert [row["prompt"] for row in rows] == [f"{tag}What is it?" for tag, _ in product(tags, range(4))]
        assert all(isinstance(row["completion"], str) and isinstance(row["length_and_sum"], float) for row in rows)
        held = {
            (i, key)
            for (i, row), key in product(enumerate(rows), ("audio", "images", "video"))
            if row[key] is not None
        }
        assert held == {(0, "audio"), (4, "images"), (8, "video")}

        assert {key for key in entry if "/" in key} == {"completions/audio/0", "completions/video/2"}
        assert rows[0]["audio"] == "completions/audio/0"
        sound = entry["completions/audio/0"]
        film = entry["completions/video/2"]
        assert (sound["_type"], film["_type"]) == ("trackio.audio", "trackio.video")
        assert all(cell["_type"] == "trackio.image" for cell in rows[4]["images"])
        pictures = [media / cell["file_path"] for cell in rows[4]["images"]]
        clip = assert_shown(step, media / sound["file_path"], pictures)
        for cell, frame in zip(rows[8]["video"], clip, strict=True):
            assert_close(shown_as(media / cell["file_path"]), frame)
        assert_close(load_video(ref("video", str(media / film["file_path"])))[0], clip)


@pytest.mark.slow
def test_tensorboard(boards):
    events = EventAccumulator(str(boards / "tensorboard"), size_guidance={"audio": 0, "images": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    assert sorted(tags["audio"]) == ["completions/audio/0"]
    pictures = ["completions/images/1", "completions/images/1.0", "completions/images/1.1", "completions/video/2"]
    assert sorted(tags["images"]) == pictures
    heard = events.Audio("completions/audio/0")
    assert [event.step for event in heard] == [1, 2]

    def picture(tag, step):
        (event,) = (event for event in events.Images(tag) if event.step == step)
        return io.BytesIO(event.encoded_image_string)

    for event, names in zip(heard, (pictures[:1], pictures[1:3]), strict=True):
        shown = [picture(name, event.step) for name in names]
        clip = assert_shown(event.step, io.BytesIO(event.encoded_audio_string), shown)
        assert_close(shown_as(picture("completions/video/2", event.step)), np.concatenate(clip, axis=1))

    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/text_summary")]
    assert len(texts) == 2
    header, line, *rows = texts[1].splitlines()
    assert header == "| step | prompt | completion | length_and_sum | advantage | images | audio | video |"
    assert line == "| --- " * 8 + "|" and len(rows) == 16
    assert rows[4].startswith("| 2 | &lt;image&gt;&lt;image&gt;What is it? | ")
    assert rows[4].endswith(" | completions/images/1.0, completions/images/1.1 |  |  |")
    assert rows[5].endswith(" |  |  |  |")


@pytest.mark.slow
def test_wandb(boards):
    (run_folder,) = (boards / "wandb" / "wandb").glob("offline-run-*")
    assert len(list(run_folder.glob("files/media/table/*.table.json"))) == 2
    # Media of a table are files of its artifact, which wait for the upload
    staged = [path.read_bytes() for path in (boards / "wandb" / "artifacts" / "staging").iterdir()]
    by_hash = {hashlib.sha256(data).hexdigest(): data for data in staged}
    tables = [json.loads(data) for data in staged if data.startswith(b'{"_type": "table"')]
    tables = {found["data"][0][found["columns"].index("step")]: found for found in tables}
    assert sorted(tables) == [1, 2]
    for step, found in tables.items():
        rows = [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
        names = [f"images_{i}" for i in range(step)]
        media = {"audio": (0, "audio-file"), "video": (8, "video-file"), **dict.fromkeys(names, (4, "image-file"))}
        assert set(found["columns"]) == {"step", "prompt", "completion", "length_and_sum", "advantage", *media}
        assert len(rows) == 16
        files = {}
        for name, (place, kind) in media.items():
            assert [i for i, row in enumerate(rows) if row[name] is not None] == [place]
            assert rows[place][name]["_type"] == kind
            files[name] = by_hash[rows[place][name]["sha256"]]
        clip = assert_shown(step, io.BytesIO(files["audio"]), [io.BytesIO(files[name]) for name in names])
        assert_close(load_video(ref("video", files["video"]))[0], clip)


def test_unique_prompts_are_told_apart_by_their_media(tmp_path, monkeypatch):
    """This concerns the boards. The parquet holds all rows."""
    rows = Dataset.from_list([{"prompt": "Who speaks?"}] * 8)
    rows = with_media(rows, "audio", [sound(0.3, seed=i) for i in range(8)])
    options = {"report_to": ["tensorboard"], "log_unique_prompts": True, "per_device_train_batch_size": 16}
    monkeypatch.setattr(media_logs, "MAX_PROMPTS", 3)
    train("audio", tmp_path, rows=rows, max_steps=1, **options)
    (folder,) = (tmp_path / "_private" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/text_summary"))
    assert len(text.splitlines()) == 2 + 4
    assert sorted(events.Tags()["audio"]) == [f"completions/audio/{i}" for i in range(3)]
    assert len(table(tmp_path, 1)) == 16


# Limits


def said(caplog):
    return [record.getMessage() for record in caplog.records if "This warning is shown once." in record.getMessage()]


@pytest.mark.parametrize(("kind", "n"), [("audio", 32), ("image", 48)])
def test_first_prompts_have_their_media(kind, n, tmp_path, caplog):
    rows = ROWS[kind](n // 4)
    with caplog.at_level(logging.WARNING):
        train(kind, tmp_path, rows=rows, per_device_train_batch_size=n)
    for step in (1, 2):
        assert [i for i, row in enumerate(table(tmp_path, step)) if row[kind] is not None] == [*range(0, 32, 4)]
    messages = said(caplog)
    assert len(messages) == (n > 32)
    assert all("12 prompts with media in the table of completions, only the first 8 are" in text for text in messages)


def test_large_media_are_left_out(tmp_path, caplog, monkeypatch):
    """The sounds of 0.3 s have 9644 bytes with their header; those of 0.9 s have more than twice as many."""
    monkeypatch.setattr(media_logs, "MAX_BYTES", 1e4)
    with caplog.at_level(logging.WARNING):
        train("audio", tmp_path, shuffle_dataset=False)
    assert [i for i, row in enumerate(table(tmp_path, 1)) if row["audio"] is not None] == [0]
    assert all(row["audio"] is None for row in table(tmp_path, 2))
    (message,) = said(caplog)
    assert "row 1, column 'audio': 0.0 MB are too much to log" in message


def test_the_bound_is_that_of_a_prompt(tmp_path, monkeypatch):
    """Two of its images fit, all three don't."""
    size = max(len(media_file(ref("image", row["images"][0]), 1e9).data) for row in images_rows(8))
    assert size < 20_000
    monkeypatch.setattr(media_logs, "MAX_BYTES", 2.5 * size)
    train("images", tmp_path, max_steps=4, shuffle_dataset=False)
    for step in range(1, 5):
        for row in table(tmp_path, step).select([0, 4]):
            count = 1 + index_of(row) % 3
            assert len(row["images"] or []) == (count if count < 3 else 0)


# Cost

HERE = {"self_check": False, "media_prefetch": 0}  # counts decoding in this process


@pytest.fixture
def decodes(monkeypatch):
    """Counts how often training decodes an image, and logging encodes it. The self-check decodes one more."""
    counts = {"train": 0, "log": 0}

    def counting(name, function):
        def counted(*args):
            counts[name] += 1
            return function(*args)

        return counted

    monkeypatch.setattr(encoding, "load_image", counting("train", load_image))
    monkeypatch.setattr(media_logs, "media_file", counting("log", media_file))
    return counts


def test_off_switch(tmp_path, decodes):
    trainer = train("image", tmp_path / "text", log_multimodal=False, **HERE)
    assert "image" not in table(tmp_path / "text", 1).column_names
    assert trainer._rollout_log.media.rows() == [{}] * 8
    assert decodes == {"train": 4, "log": 0}
    trainer = train("image", tmp_path / "none", log_completions=False, **HERE)
    assert trainer._rollout_log.media is None and not (tmp_path / "none" / "_private").exists()
    assert decodes == {"train": 8, "log": 0}


def test_only_what_is_logged_is_decoded(tmp_path, decodes, monkeypatch):
    """Of four batches of two prompts, the trainer logs one prompt of the last batch, and only once."""
    with monkeypatch.context() as patch:
        patch.setattr(media_logs, "MAX_PROMPTS", 1)
        train("image", tmp_path / "one", max_steps=4, logging_steps=4, **HERE)
    assert decodes == {"train": 8, "log": 1}
    # Training ends with a log, which contains rows that no table has yet
    train("image", tmp_path, max_steps=3, logging_steps=2, **HERE)
    names = [path.name for path in sorted((tmp_path / "_private" / "completions").iterdir())]
    assert names == ["completions_00002.parquet", "completions_00003.parquet"]
    assert decodes == {"train": 8 + 6, "log": 1 + 4}
    assert all(table(tmp_path, 3)[i]["image"] is not None for i in (0, 4))


def test_media_of_other_batches_are_forgotten(tmp_path):
    made = []

    def fresh(i):
        picture = image(84, 56, seed=i)["image"]
        made.append(weakref.ref(picture))
        return picture

    rows = image_rows().remove_columns("image").add_column("index", range(8))
    rows = rows.with_transform(lambda batch: {**batch, "image": [fresh(i) for i in batch["index"]]})
    trainer = train("image", tmp_path, rows=rows, max_steps=6, media_prefetch=0)
    held = {id(r.source) for refs in trainer._rollout_log.media._refs.values() for r in refs}
    assert len(held) == 2
    # The loader fetches a row once for all completions of its prompt, and one batch ahead
    assert len(made) >= 12
    assert sum(picture() is not None for picture in made) <= 4
    assert len(trainer._rollout_log.media._media) == 2


def test_training_is_the_same_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    options = {"max_steps": 3, "learning_rate": 0.05}
    plain = run(MultimodalGRPOTrainer, "qwen2_5_vl", video_rows(), **options)
    logged = run(MultimodalGRPOTrainer, "qwen2_5_vl", video_rows(), report_to=["tensorboard"], **options, **LOGGED)
    assert any(value.abs().max() > 0 for value in plain.update.values())
    for name, value in plain.update.items():
        assert torch.equal(value, logged.update[name]), name


# Several processes


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    """Both processes have completions of the second prompt. A log on the main process waits for no other rank."""
    tables = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        output = launch("processes", folder, processes)
        assert (
            output.count("Of 3 prompts with media in the table of completions, only the first 2 are logged with") == 1
        )
        names = sorted(path.name for path in (folder / "all" / "_private" / "completions").iterdir())
        assert names == [f"completions_{step:05d}.parquet" for step in (1, 2, 3)]
        tables[processes] = [table(folder / "all", step) for step in (1, 2, 3)] + [table(folder / "bound", 1)]
        counts = [json.loads(path.read_text()) for path in sorted(folder.glob("held-*.json"))]
        assert counts == [3, 0][:processes]  # only the main process has logged rows
    sources = mixed_rows(6)
    for one, two in zip(tables[1], tables[2], strict=True):
        assert one.features == two.features
        assert one["prompt"][:] == two["prompt"][:]

    def held(rows):
        return {(i, key) for (i, row), key in product(enumerate(rows), ("audio", "images", "video")) if row[key]}

    for alone, trained, evaluated, bound in tables.values():
        assert held(alone) == set()
        assert held(trained) == {(4, "audio"), (8, "images")}
        assert_same("audio", trained[4]["audio"], sources[4]["audio"])
        for logged, source in zip(trained[8]["images"], sources[5]["images"], strict=True):
            assert_same("image", logged, source)
        assert held(evaluated) == {(0, "audio"), (4, "video"), (8, "images")}  # TRL draws a different order
        assert_same("audio", evaluated[0]["audio"], sources[0]["audio"])
        assert_same("video", evaluated[4]["video"], sources[2]["video"])
        assert_same("image", evaluated[8]["images"][0], sources[1]["images"][0])
        assert held(bound) == {(0, "audio"), (4, "images")}
