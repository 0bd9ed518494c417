# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Folders of Parquet round-trip with their media."""

import shutil

import pytest
import soundfile
from datasets import Audio, Dataset, DatasetDict, Features, Image, List, Value, Video, load_dataset
from helpers.chats import RATE, audio, chat, mosaic
from helpers.files import video_file
from PIL import Image as PILImage

from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.extras.prepare import folders
from trl_multimodal_rft.extras.prepare.folders import write_folder


CLIP = video_file(mosaic(2, 56, 56, seed=0), codec="mpeg4")


@pytest.fixture
def splits(tmp_path):
    """Returns media of every kind as paths and as bytes, missing, in lists and in messages."""
    (tmp_path / "files").mkdir()
    for i in range(3):
        soundfile.write(tmp_path / "files" / f"{i}.wav", audio(0.3, i)["audio"], RATE)
        PILImage.new("RGB", (28, 28), (i, 0, 0)).save(tmp_path / "files" / f"{i}.png")
    (tmp_path / "files" / "clip.mp4").write_bytes(CLIP)
    wavs, pictures = ([str(tmp_path / "files" / f"{i}.{end}") for i in range(3)] for end in ("wav", "png"))
    block = {"type": Value("string"), "image": Image(decode=False)}
    features = {
        "prompt": List({"role": Value("string"), "content": List(block)}),
        "audio": Audio(decode=False),
        "images": List(Image()),
        "video": Video(decode=False),
        "solution": Value("string"),
        "choices": List(Value("string")),
    }
    rows = [
        {
            "prompt": chat({"type": "image", "image": {"path": pictures[i], "bytes": None}}),
            "audio": {"path": wavs[i], "bytes": None} if i else None,
            "images": pictures[:i],
            "video": {"path": None, "bytes": CLIP} if i else str(tmp_path / "files" / "clip.mp4"),
            "solution": wavs[i],
            "choices": ["a", "b"] if i else None,
        }
        for i in range(3)
    ]
    train = Dataset.from_list(rows, features=Features(features))
    return DatasetDict(train=train, held_out=train.select([2, 0]))


def test_what_is_read_is_what_was_written(splits, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_FILE_BYTES", 1)  # forces several files
    monkeypatch.setattr(folders, "_ROW_GROUP_ROWS", 2)
    (tmp_path / "out").mkdir()  # an empty folder is allowed
    bytes_of = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    pixels = [[image.getpixel((0, 0)) for image in row["images"]] for row in splits["train"]]
    write_folder(splits, tmp_path / "out")
    shutil.rmtree(tmp_path / "files")
    assert len(list((tmp_path / "out" / "data").glob("train-*-of-00002.parquet"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    read = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(read) == ["train", "held_out"] and read["train"].features == splits["train"].features
    assert read["held_out"]["solution"][:] == [str(tmp_path / "files" / f"{i}.wav") for i in (2, 0)]
    rows = list(read["train"])
    assert [row["audio"] and row["audio"]["bytes"] for row in rows] == [None, bytes_of["1.wav"], bytes_of["2.wav"]]
    assert rows[1]["audio"]["path"] == "1.wav" and rows[2]["choices"] == ["a", "b"] and rows[0]["choices"] is None
    assert [row["video"]["bytes"] for row in rows] == [CLIP] * 3
    blocks = [row["prompt"][0]["content"][0]["image"]["bytes"] for row in rows]
    assert blocks == [bytes_of[f"{i}.png"] for i in range(3)]
    assert [[image.getpixel((0, 0)) for image in row["images"]] for row in rows] == pixels
    write_folder(read["train"].select([1]), tmp_path / "one")
    (again,) = load_dataset(str(tmp_path / "one"), cache_dir=str(tmp_path / "cache")).values()
    assert again.split == "train" and again[0]["audio"] == rows[1]["audio"]


def test_nothing_is_left_of_what_fails(splits, tmp_path):
    with pytest.raises(MediaError, match=r"row 0, column 'prompt\[0\].content\[0\].image': .*allowed_media_folders"):
        write_folder(splits, tmp_path / "out", MediaRules(allowed_media_folders=("/nowhere",)))
    (tmp_path / "files" / "2.wav").unlink()
    with pytest.raises(MediaError, match="row 2, column 'audio': no such file: '.*2.wav'"):
        write_folder(splits, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    with pytest.raises(ValueError, match="files' isn't an empty folder; name another"):
        write_folder(splits, tmp_path / "files")
    with pytest.raises(ValueError, match="'train' has a transform"):
        write_folder(splits["train"].with_transform(lambda batch: batch), tmp_path / "out")
    with pytest.raises(ValueError, match="'test' has no rows"):
        write_folder(DatasetDict(test=splits["train"].select([])), tmp_path / "out")
