# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets whose features decode media: the trainers read the stored files, rewards get the features' objects."""

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap

import datasets
import numpy as np
import PIL.Image
import pytest
import soundfile
import torch
from datasets import Audio, Dataset, Features, Image, List, Value, Video, load_dataset
from helpers.chats import RATE, audio, image, video
from helpers.chats import user as chat
from helpers.marks import slow_but
from helpers.trainer_utils import InjectedOurs, load, make_trainer, run
from packaging.version import Version

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.data.reading.decoding import load_image
from trl_multimodal_rft.data.reading.media_files import mp4
from trl_multimodal_rft.data.reading.refs import Encoded, MediaError, MediaRef
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.rows.batches import DatasetRows
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.features import Decoded, as_encoded, restore_media, restore_rows, undecoded
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate


FAMILY = {"image": "qwen2_5_vl", "audio": "qwen2_audio", "video": "qwen2_5_vl"}
ENDING = {"image": "png", "audio": "wav", "video": "mp4"}
FORMS = ["table", "stream", "parquet"]
OPTIONS = {"self_check": False, "max_steps": 1, "shuffle_dataset": False}
N = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a folder of files with their prompts for each kind, as an input of `load_dataset`."""
    root = tmp_path_factory.mktemp("folders")
    for kind, ending in ENDING.items():
        (root / kind).mkdir()
        lines = []
        for i in range(N):
            file = root / kind / f"{i}.{ending}"
            if kind == "image":
                image(84, 56, seed=i)["image"].save(file)
            elif kind == "audio":
                soundfile.write(file, audio(0.3 + 0.1 * i, i)["audio"], RATE)
            else:
                file.write_bytes(mp4(video(4, 84, 56, seed=i)["video"], 2))
            lines.append(json.dumps({"file_name": file.name, "prompt": chat(f"What is it? {i}"), "number": i}))
        (root / kind / "metadata.jsonl").write_text("\n".join(lines))
    return root


def loaded(root, kind: str, form: str = "table"):
    """Returns the dataset as a table, a stream, or a table of parquet files with embedded media."""
    options = {"data_dir": str(root / kind), "split": "train", "cache_dir": str(root / "cache")}
    dataset = load_dataset(f"{kind}folder", streaming=form == "stream", **options)
    if form != "parquet":
        return dataset
    path = root / f"{kind}.parquet"
    features = dataset.features
    stored = Features({**features, kind: type(features[kind])(decode=False)})
    rows = list(dataset.cast_column(kind, stored[kind]))
    for row in rows:
        with open(row[kind]["path"], "rb") as file:
            row[kind] = {"bytes": file.read(), "path": row[kind]["path"].split("/")[-1]}
    Dataset.from_list(rows, features=features).to_parquet(path)
    return load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(root / "cache"))


def same(given, expected) -> bool:
    """Returns whether two media are equal, and of one type for `isinstance`."""
    if not isinstance(given, type(expected)):
        return False
    if isinstance(expected, PIL.Image.Image):
        return given == expected and np.array_equal(np.asarray(given), np.asarray(expected))
    if hasattr(expected, "get_all_samples"):
        assert given["sampling_rate"] == expected["sampling_rate"]
        return np.array_equal(given["array"], expected["array"])
    return len(given) == len(expected) and all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "form"),
    slow_but(
        itertools.product(ENDING, FORMS),
        *zip(ENDING, FORMS, strict=True),
    ),
)
def test_rewards_get_what_the_feature_gives(kind, form, folders):
    seen = {}

    def looking(prompts, completions, number, **columns):
        for i, prompt, medium in zip(number, prompts, columns[kind], strict=True):
            seen.setdefault(i, []).append((medium, prompt[0]["content"][0][kind]))
        return [float(len(completion[0]["content"])) for completion in completions]

    dataset = loaded(folders, kind, form)
    run(InjectedOurs, FAMILY[kind], dataset, reward=looking, **OPTIONS)
    expected = list(loaded(folders, kind, "table"))
    assert sum(map(len, seen.values())) == 8 and len(seen) == 2
    for i, media in seen.items():
        assert len({id(medium) for medium, _ in media}) == 1  # decoded once per group
        for medium, of_prompt in media:
            assert same(medium, expected[i][kind]) and same(of_prompt, expected[i][kind])


@pytest.mark.parametrize(("kind", "form"), [("image", "table"), ("audio", "stream"), ("video", "table")])
def test_nothing_is_decoded_that_nobody_looks_at(kind, form, folders, monkeypatch):
    feature = {"image": Image, "audio": Audio, "video": Video}[kind]
    decode = feature.decode_example
    decoded = []

    def counted(self, value, **options):
        decoded.append(value)
        return decode(self, value, **options)

    monkeypatch.setattr(feature, "decode_example", counted)
    touch = []

    def reward(prompts, completions, **columns):
        assert [prompt[-1]["content"][-1]["text"] for prompt in prompts] and len(columns[kind]) == 8
        assert isinstance(columns[kind], list) and repr(columns[kind][0]) == f"<{kind}>"
        if touch:
            return [float(columns[kind][i].__class__ is not None) for i in range(8)]
        return [0.0] * 8

    run(InjectedOurs, FAMILY[kind], loaded(folders, kind, form), reward=reward, log_completions=True, **OPTIONS)
    assert not decoded
    touch.append(True)
    run(InjectedOurs, FAMILY[kind], loaded(folders, kind, form), reward=reward, **OPTIONS)
    assert len(decoded) == 2


def test_the_update_is_that_of_decoded_media(folders):
    table = loaded(folders, "image")
    rows = [{**row, "image": row["image"]} for row in table]
    plain = Dataset.from_dict({"number": range(N)}).with_transform(
        lambda batch: {key: [rows[i][key] for i in batch["number"]] for key in rows[0]}
    )
    ours, theirs = (run(InjectedOurs, FAMILY["image"], each, **OPTIONS).update for each in (table, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Errors


def with_corrupt(root, kind: str, form: str, tmp_path):
    """The second of four files is broken."""
    parquet = loaded(root, kind, "parquet")
    rows = list(undecoded(parquet).__getitems__(list(range(N))))
    rows = [{**row, kind: {**row[kind].value}} for row in rows]
    rows[1][kind]["bytes"] = b"broken"
    path = str(tmp_path / "rows.parquet")
    options = {"split": "train", "cache_dir": str(tmp_path)}
    Dataset.from_list(rows, features=parquet.features).to_parquet(path)
    return load_dataset("parquet", data_files=path, streaming=form == "stream", **options)


@pytest.mark.parametrize("kind", ENDING)
def test_a_corrupt_file_has_its_row_its_column_and_its_name(kind, folders, tmp_path):
    for form in ("table", "stream"):
        with pytest.raises(MediaError, match=rf"row \d+, column '{kind}' \(1\.{ENDING[kind]}\): "):
            run(InjectedOurs, FAMILY[kind], with_corrupt(folders, kind, form, tmp_path), **OPTIONS)


@pytest.mark.slow
def test_other_readers_name_a_corrupt_file_too(folders, tmp_path):
    dataset = with_corrupt(folders, "image", "table", tmp_path)
    message = r"row \d+, column 'image' \(1\.png\): "
    with pytest.raises(MediaError, match=message):
        evaluate(*load(FAMILY["image"]), dataset, lambda completions, **_: [0.0], EvaluationConfig(batch_size=4))
    objects = {"ptx_dataset": dataset.remove_columns("number").add_column("completion", ["a cat"] * N)}
    options = {**OPTIONS, "ptx_coef": 1.0, "ptx_batch_size": N}
    with pytest.raises(MediaError, match=message):
        run(MultimodalPPOTrainer, FAMILY["image"], loaded(folders, "image"), objects=objects, **options)
    stream = with_corrupt(folders, "image", "stream", tmp_path)
    trainer = make_trainer(InjectedOurs, FAMILY["image"], loaded(folders, "image"), tmp_path, **OPTIONS)
    with pytest.raises(MediaError, match=message):
        trainer.evaluate(stream)
    # Only rewards access it
    rows = restore_rows(DatasetRows(dataset.rename_column("image", "picture")).__getitems__([0, 1]))
    pictures = [row["picture"] for row in rows]
    for look in (lambda: pictures[1].size, lambda: [each.size for each in pictures]):
        with pytest.raises(MediaError, match=r"row 1, column 'picture' \(1\.png\): cannot read this image"):
            look()


def test_rewards_open_nothing_that_the_rules_forbid(folders, tmp_path):
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n%%EOF\n"
    features = Features({"image": Image(), "audio": Audio(), "video": Video()})
    playlist = f"#EXTM3U\n#EXTINF:10,\n{folders / 'video' / '0.mp4'}\n#EXT-X-ENDLIST\n".encode()
    row = {"image": {"bytes": program}, "audio": {"bytes": playlist}, "video": {"bytes": playlist}}
    (row,) = restore_rows(DatasetRows(Dataset.from_list([row], features=features)).__getitems__([0]))
    for kind, medium in row.items():
        with pytest.raises(MediaError, match=f"row 0, column '{kind}'"):
            medium.__class__  # noqa: B018
    rows = DatasetRows(loaded(folders, "image")).__getitems__([0])
    for rules, option in (
        (MediaRules(allowed_media_folders=("/nowhere",)), "allowed_media_folders"),
        (MediaRules(max_image_pixels=100), "max_image_pixels"),
    ):
        with pytest.raises(MediaError, match=f"row 0, column 'image': .*`{option}`"):
            restore_rows(rows, rules)[0]["image"].size  # noqa: B018


@pytest.mark.slow
def test_without_torchcodec(folders, tmp_path):
    """
    Without the package, and without its FFmpeg, the other libraries train on media of features. The error of the
    reward function that decodes them names the missing package.
    """
    loaded(folders, "audio", "parquet")
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import gc, os, sys
            gc.disable()
            sys.modules["torchcodec"] = None  # imports work without it
            import datasets
            from datasets import load_dataset
            from helpers.trainer_utils import InjectedOurs, run
            from trl_multimodal_rft.rewards.failures import RewardError
            from trl_multimodal_rft.versions import is_torchcodec_usable
            table = load_dataset("parquet", data_files={str(folders / "audio.parquet")!r}, split="train",
                                 cache_dir={str(tmp_path)!r})
            sounds, videos = (
                load_dataset(f"{{kind}}folder", data_dir=f"{folders}/{{kind}}", split="train", streaming=True)
                for kind in ("audio", "video")
            )
            def touching(completions, audio=(), video=(), **columns):
                return [float(len(medium)) for medium in (*audio, *video)]
            for lacks in ("torchcodec", "its FFmpeg"):
                if lacks == "its FFmpeg":
                    del sys.modules["torchcodec"]
                    is_torchcodec_usable.cache_clear()
                    datasets.config.TORCHCODEC_AVAILABLE = True
                print("usable:", is_torchcodec_usable(), lacks)
                for family, rows in ("qwen2_audio", table), ("qwen2_audio", sounds), ("qwen2_5_vl", videos):
                    run(InjectedOurs, family, rows, **{OPTIONS})
                    try:
                        run(InjectedOurs, family, rows, reward=touching, **{OPTIONS})
                    except RewardError as error:
                        print("said:", *str(error).split())
            sys.stdout.flush()
            os._exit(0)  # clearing all modules takes seconds
            """
        )
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    env["PYTHONPATH"] = ":".join(sys.path)
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, env=env)
    if "usable: True its FFmpeg" in found.stdout:
        pytest.skip("the machine has an FFmpeg of its own")
    assert found.returncode == 0, found.stderr
    said = [line for line in found.stdout.splitlines() if line.startswith("said:")]
    names = ["row 0, column 'audio' (0.wav)", "row 0, column 'audio'", "row 0, column 'video'"]
    assert len(said) == 6
    for line, name in zip(said, names * 2, strict=True):
        assert line.startswith("said: The reward function 'touching' raised ImportError for one of the rows [0, ")
        assert f"{name}: Datasets decodes it with torchcodec, which isn't installed or finds no FFmpeg" in line


# Features


def nested(root) -> Dataset:
    path = str(root / "image" / "0.png")
    blocks = {"type": Value("string"), "text": Value("string"), "image": Image()}
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": List(blocks)}),
            "extra": {"views": List(Image()), "words": Value("string")},
            "frames": List(List(Image())),
            "grey": Image(mode="L"),
            "raw": Image(decode=False),
        }
    )
    content = [{"type": "image", "image": path}, {"type": "text", "text": "What is it?"}]
    row = {
        "prompt": [{"role": "user", "content": content}],
        "extra": {"views": [path, None], "words": "a cat"},
        "frames": [[path], []],
        "grey": path,
        "raw": path,
    }
    return Dataset.from_list([row, {**row, "extra": None, "frames": None, "grey": None, "raw": None}], features)


@pytest.mark.parametrize("form", ["table", "stream"])
def test_nested_features(form, folders):
    dataset = nested(folders)
    given = dataset if form == "table" else dataset.to_iterable_dataset()
    rows = undecoded(given).__getitems__([0, 1]) if form == "table" else list(undecoded(given))
    first = rows[0]
    for medium in (first["prompt"][0]["content"][0]["image"], first["extra"]["views"][0], first["frames"][0][0]):
        assert isinstance(medium, Encoded) and medium.modality == "image" and medium.value["path"].endswith("0.png")
    assert first["grey"].mode == "L" and first["raw"]["path"].endswith("0.png")  # as their features define
    for restored, expected in zip(restore_rows(rows), dataset, strict=True):
        assert restored == expected
    (row,) = rows_to_messages(rows[:1])
    ref = row["prompt"][0]["content"][0]["image"]
    expected = dataset[0]["prompt"][0]["content"][0]["image"]
    assert np.array_equal(load_image(ref), expected) and ref.column == "prompt[0].content[0]"
    assert restore_media(row["prompt"])[0]["content"][0] == {"type": "image", "image": expected}


def test_selections_formats_and_streams_are_kept(folders):
    dataset = loaded(folders, "image")
    chosen = dataset.select([3, 1]).select_columns(["image", "number"])
    rows = undecoded(chosen).__getitems__([0, 1])
    assert [row["number"] for row in rows] == [3, 1] and [*rows[0]] == ["image", "number"]
    hidden = dataset.with_format(None, columns=["number"])
    assert undecoded(hidden).__getitems__([2]) == [{"number": 2}]
    for formatted in (dataset.with_format("torch"), dataset.with_transform(lambda batch: batch)):
        assert undecoded(formatted) is formatted
    text = dataset.remove_columns("image")
    assert undecoded(text) is text and undecoded(None) is None
    stream = dataset.to_iterable_dataset().remove_columns("image")
    assert undecoded(stream) is stream
    stream = loaded(folders, "image", "stream").decode(num_threads=2)
    kinds = Encoded if Version(datasets.__version__) >= Version("5.2") else PIL.Image.Image  # which decodes ahead
    assert all(isinstance(row["image"], kinds) for row in undecoded(stream))
    generated = datasets.IterableDataset.from_generator(
        lambda: iter([{"image": image(84, 56)["image"]}]), features=Features({"image": Image()})
    )
    (row,) = undecoded(generated)
    assert np.array_equal(load_image(MediaRef("image", row["image"], {}, "image", 0)), image(84, 56)["image"])


def test_several_media_in_a_column_of_one():
    feature = Features({"prompt": Value("string"), "audio": List(Audio()), "video": List(Video())})
    clip = {"bytes": b"RIFF", "path": "a.wav"}
    for kind in ("audio", "video"):
        row = {"prompt": "What?", "audio": None, "video": None, kind: [clip]}
        rows = undecoded(Dataset.from_list([row], features=feature)).__getitems__([0])
        with pytest.raises(MediaError, match=f"row 0, column '{kind}': holds a list; rename the column to '{kind}s'"):
            rows_to_messages(rows)


def test_decoded_media_behave_as_what_they_are(folders):
    dataset = loaded(folders, "image")
    (row,) = restore_rows(DatasetRows(dataset).__getitems__([0]))
    lazy = row["image"]
    expected = dataset[0]["image"]
    assert type(lazy) is Decoded and isinstance(lazy, PIL.Image.Image) and lazy == expected == lazy
    assert lazy.convert("L") == expected.convert("L") and np.asarray(lazy).shape == (56, 84, 3)
    assert copy.deepcopy(lazy) is lazy and pickle.loads(pickle.dumps(lazy)) == expected
    assert as_encoded([{"image": lazy}]) == [{"image": DatasetRows(dataset)[0]["image"]}]
    lazy.info["seen"] = True
    assert lazy.info["seen"] and lazy != dataset[1]["image"] and lazy
    (row,) = restore_rows(DatasetRows(loaded(folders, "video")).__getitems__([0]))
    assert len(row["video"]) == 4 and [frame.shape for frame in row["video"]] == [(3, 56, 84)] * 4
