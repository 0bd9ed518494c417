# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The rules for media of a config reach whatever opens a medium in its run."""

import copy
import math
import os
import pickle
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import soundfile
from datasets import Dataset, Image
from helpers.chats import RATE, audio, image, text, video
from helpers.trainer_utils import Injected, InjectedOurs, load, make_trainer, run
from test_media_sources import site  # noqa: F401
from trl import TrlParser

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.data.columns import MediaError, MediaRef, iter_refs, rows_to_messages
from trl_multimodal_rft.data.encode import encode_medium, mp4
from trl_multimodal_rft.data.features import restore_rows, undecoded
from trl_multimodal_rft.data.fingerprint import differences, fingerprint
from trl_multimodal_rft.data.loading import load_image, load_video
from trl_multimodal_rft.data.rules import DEFAULT_RULES, PROTOCOLS, MediaRules
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer
from trl_multimodal_rft.rewards import RemoteReward


CONFIGS = (MultimodalGRPOConfig, MultimodalRLOOConfig, MultimodalPPOConfig)
FAMILY = "qwen2_5_vl"


class Rloo(Injected, MultimodalRLOOTrainer):
    pass


class Ppo(Injected, MultimodalPPOTrainer):
    pass


def chat(words: str = "What is it?") -> list[dict]:
    return [{"role": "user", "content": words}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a file of each kind in `own`, and an image beside it."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "own").mkdir()
    image(84, 56)["image"].save(folder / "own" / "i.png")
    image(84, 56, seed=1)["image"].save(folder / "other.png")
    soundfile.write(folder / "own" / "a.wav", audio(0.5)["audio"], RATE)
    (folder / "own" / "v.mp4").write_bytes(mp4(video(4, 84, 56)["video"], 2))
    return folder


def rows(path, column: str = "image", n: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": chat(), column: str(path)}] * n)


def one_outside(folder) -> Dataset:
    return Dataset.from_list(
        [{"prompt": chat(), "image": str(folder / ("other.png" if i == 1 else "own/i.png"))} for i in range(8)]
    )


# Options


@pytest.mark.parametrize("config_class", CONFIGS)
def test_rules_are_options_of_every_config(config_class, tmp_path):
    own = {"use_cpu": True, "bf16": False}
    assert config_class(str(tmp_path), **own).media_rules == DEFAULT_RULES
    line = (
        f"--output_dir {tmp_path} --use_cpu true --bf16 false --allowed_media_protocols file memory "
        "--allowed_media_folders /a /b --allowed_media_domains example.com --max_media_bytes 5 --max_image_pixels 6 "
        "--max_audio_seconds 7.5 --max_video_seconds inf --max_video_pixels 8 --media_timeout 9 "
        f"--media_dir {tmp_path}"
    )
    (args,) = TrlParser(config_class).parse_args_and_config(line.split())
    rules = MediaRules(("file", "memory"), ("/a", "/b"), ("example.com",), 5, 6, 7.5, math.inf, 8, 9.0, str(tmp_path))
    assert args.media_rules == rules and copy.deepcopy(args).media_rules == rules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_media_folders": "/data"}, r"`allowed_media_folders` must be a list.*write \['/data'\]"),
        ({"allowed_media_domains": ["https://a.b/c"]}, "`allowed_media_domains` has 'https://a.b/c'; write hosts"),
        ({"allowed_media_protocols": ["s3://"]}, "`allowed_media_protocols` has 's3://'; write names"),
        ({"max_media_bytes": 0}, "`max_media_bytes` must be positive, got 0"),
        ({"max_audio_seconds": math.nan}, "`max_audio_seconds` must be positive, got nan"),
        ({"media_timeout": -1.0}, "`media_timeout` must be positive, got -1.0"),
    ],
)
def test_rules_that_make_no_sense(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        MultimodalGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_references_carry_the_rules_wherever_they_stand():
    rules = MediaRules(max_media_bytes=5)
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, text("?")]}]
    placed = rows_to_messages(
        [
            {"prompt": "What?", "image": "a.png", "audios": ["a.wav", "b.wav"]},
            {"prompt": "Is it <video>?", "video": "a.mp4"},
            {"prompt": blocks, "images": ["a.png", "b.png"]},
            {"prompt": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}]}]},
        ],
        rules=rules,
    )
    refs = list(iter_refs(placed))
    assert len(refs) == 7 and all(ref.rules is rules for ref in refs)
    assert [copy.deepcopy(ref) is ref for ref in refs] == [True] * 7 and pickle.loads(
        pickle.dumps(refs[0])
    ) == "<image>"


# Places


OPTIONS = {"self_check": False, "max_steps": 1, "shuffle_dataset": False}


def by_trainer(trainer_class, folder, tmp_path, serve, **ours):
    run(trainer_class, FAMILY, one_outside(folder), **OPTIONS, **ours)


def by_supervised(folder, tmp_path, serve, **ours):
    outside = rows(folder / "other.png").add_column("completion", ["a cat"] * 8)
    run(Ppo, FAMILY, rows(folder / "own" / "i.png"), objects={"ptx_dataset": outside}, ptx_coef=1.0, **OPTIONS, **ours)


def by_evaluation_of_a_trainer(folder, tmp_path, serve, **ours):
    trainer = make_trainer(InjectedOurs, FAMILY, rows(folder / "own" / "i.png"), tmp_path, **ours)
    evaluate_trainer(trainer, one_outside(folder))


def by_evaluation(folder, tmp_path, serve, **ours):
    evaluate(
        *load(FAMILY),
        one_outside(folder),
        lambda completions, **_: [0.0] * len(completions),
        EvaluationConfig(max_completion_length=2),
        media_rules=MediaRules(**ours),
    )


def by_remote_reward(folder, tmp_path, serve, **ours):
    data = one_outside(folder)
    run(
        InjectedOurs,
        FAMILY,
        data,
        reward=RemoteReward(serve().url),
        ignored_media_columns=["image"],
        **OPTIONS,
        **ours,
    )


def by_reward_model(folder, tmp_path, serve, **ours):
    from test_reward_models import RewardModel, classifier

    run(
        InjectedOurs,
        FAMILY,
        one_outside(folder),
        reward=RewardModel(*classifier()),
        ignored_media_columns=["image"],
        **OPTIONS,
        **ours,
    )


def by_experience_maker(folder, tmp_path, serve, **ours):
    from test_experience_maker import make

    make(family=FAMILY, media_rules=MediaRules(**ours)).make_experience_list(
        list(one_outside(folder)), max_new_tokens=2
    )


def by_grpo(*args, **ours):
    by_trainer(InjectedOurs, *args, **ours)


def by_rloo(*args, **ours):
    by_trainer(Rloo, *args, **ours)


def by_ppo(*args, **ours):
    by_trainer(Ppo, *args, **ours)


PLACES = [
    by_grpo,
    by_rloo,
    by_ppo,
    by_supervised,
    by_evaluation_of_a_trainer,
    by_evaluation,
    by_remote_reward,
    by_reward_model,
    by_experience_maker,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[3:])
def test_every_place_keeps_to_the_folders(place, folder, tmp_path, serve):
    message = r"row \d+, column 'image': '.*other.png' is in none of `allowed_media_folders`; add its folder"
    with pytest.raises(MediaError, match=message):
        place(folder, tmp_path, serve, allowed_media_folders=[str(folder / "own")])
    place(folder, tmp_path, serve, allowed_media_folders=[str(folder)])


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[3:])
def test_every_place_starts_relative_paths_from_the_folder(place, folder, tmp_path, serve):
    start = r"\(relative paths start from the working directory; `media_dir` names another\); correct the path"
    with pytest.raises(MediaError, match=rf"row \d+, column 'image': no such file: '{os.getcwd()}/.*png' {start}"):
        place(Path(), tmp_path, serve)
    place(Path(), tmp_path, serve, media_dir=str(folder))


@pytest.mark.parametrize("path", ["../other.png", "other.png"])
def test_folder_of_relative_paths_widens_nothing(path, folder, tmp_path):
    inside = folder / "own"
    media_dir = str(inside if path.startswith("..") else folder)
    run(InjectedOurs, FAMILY, rows(path), media_dir=media_dir, **OPTIONS)
    with pytest.raises(MediaError, match="other.png' is in none of `allowed_media_folders`"):
        run(InjectedOurs, FAMILY, rows(path), media_dir=media_dir, allowed_media_folders=[str(inside)], **OPTIONS)
    with pytest.raises(ValueError, match=f"`media_dir` is '{folder}/nowhere', which isn't a folder"):
        MediaRules(media_dir=str(folder / "nowhere"))


def test_a_file_that_is_missing_in_the_folder(folder):
    with pytest.raises(MediaError, match=rf"'{folder}/b.png' \(relative paths start from `media_dir`, '{folder}'\)"):
        load_image(MediaRef("image", "b.png", {}, "image", 3, MediaRules(media_dir=str(folder))))


def test_relative_paths_in_every_form(folder, monkeypatch):
    """Blocks, features and what they give to functions, frames, archives, and a path of the home folder."""
    monkeypatch.setenv("HOME", str(folder.parent))
    rules = MediaRules(media_dir=f"~/{folder.name}")
    with zipfile.ZipFile(folder / "all.zip", "w") as packed:
        packed.write(folder / "other.png", "o.png")
    expected = load_image(MediaRef("image", str(folder / "other.png"), {}, "image", 0))
    for source in ("other.png", {"path": "other.png"}, Path("other.png"), "zip://o.png::all.zip"):
        assert load_image(MediaRef("image", source, {}, "image", 0, rules)) == expected
    frames, _ = load_video(MediaRef("video", ["other.png"] * 2, {}, "video", 0, rules))
    assert (frames[1] == np.asarray(expected)).all()
    stored = undecoded(rows("other.png").cast_column("image", Image()))
    (restored,) = restore_rows(stored.__getitems__([0]), rules)
    assert np.asarray(restored["image"]).tobytes() == np.asarray(expected).tobytes()
    block = {"type": "image", "path": "other.png"}
    placed = rows_to_messages([{"prompt": [{"role": "user", "content": [block]}]}], rules=rules)
    assert [load_image(ref) for ref in iter_refs(placed)] == [expected]


def test_changed_files_in_the_folder_are_another_dataset(folder, tmp_path):
    (tmp_path / "i.png").write_bytes(b"one")
    before, absolute = fingerprint(rows("i.png"), str(tmp_path)), fingerprint(rows(tmp_path / "i.png"))
    assert before == absolute != fingerprint(rows("i.png"))
    (tmp_path / "i.png").write_bytes(b"three")
    assert differences(before, fingerprint(rows("i.png"), str(tmp_path)))


def test_protocols_of_the_user(folder):
    with fsspec.open("memory://i.png", "wb") as file:
        file.write((folder / "own" / "i.png").read_bytes())
    with pytest.raises(MediaError, match="row 0, column 'image': the protocol 'memory' isn't one of"):
        run(InjectedOurs, FAMILY, rows("memory://i.png"), **OPTIONS)
    run(InjectedOurs, FAMILY, rows("memory://i.png"), allowed_media_protocols=[*PROTOCOLS, "memory"], **OPTIONS)
    for path in (folder / "own" / "i.png", (folder / "own" / "i.png").as_uri()):
        with pytest.raises(MediaError, match="row 0, column 'image': the protocol 'file' isn't one of"):
            run(InjectedOurs, FAMILY, rows(path), allowed_media_protocols=["memory"], **OPTIONS)


def test_a_host_that_only_looks_allowed_is_not_asked_in_a_run(site):  # noqa: F811
    url = f"http://127.0.0.1:{site.server_port}\\@allowed.example/i.png"
    with pytest.raises(MediaError, match="row 0, column 'image': its URL has a backslash"):
        run(InjectedOurs, FAMILY, rows(url), allowed_media_domains=["allowed.example"], **OPTIONS)
    assert not site.asked


@pytest.mark.parametrize(
    ("name", "option", "limit"),
    [
        ("i.png", "max_media_bytes", 100),
        ("i.png", "max_image_pixels", 84 * 56 - 1),
        ("a.wav", "max_audio_seconds", 0.4),
        ("v.mp4", "max_video_seconds", 1.5),
        ("v.mp4", "max_image_pixels", 84 * 56 - 1),
    ],
)
def test_limits_bite(folder, name, option, limit):
    column = {"i": "image", "a": "audio", "v": "video"}[name[0]]
    data = rows(folder / "own" / name, column)
    with pytest.raises(MediaError, match=f"row 0, column '{column}': .*raise `{option}`"):
        run(InjectedOurs, "qwen2_audio" if column == "audio" else FAMILY, data, **OPTIONS, **{option: limit})


def test_logged_media_keep_the_rules_of_the_run(folder):
    """What the policy may see can be shown, though it is larger than what is allowed by default."""
    rules = MediaRules(max_image_pixels=10**9)
    medium = encode_medium(MediaRef("image", folder / "own" / "i.png", {}, "image", 0, rules), 1e6)
    assert pickle.loads(pickle.dumps(medium)).ref().rules == rules
