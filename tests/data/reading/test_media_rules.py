# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A config's rules for media apply everywhere in its run."""

import copy
import math
import os
import pickle
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from datasets import Dataset, Image
from helpers.chats import image, text
from helpers.rloo_runs import InjectedOurs as InjectedRLOO
from helpers.trainer_utils import CONFIGS, InjectedOurs, InjectedPPO, load, make_trainer, run
from trl import TrlParser

from trl_multimodal_rft.data.reading.decoding import load_image, load_video
from trl_multimodal_rft.data.reading.media_files import media_file
from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef, iter_refs
from trl_multimodal_rft.data.reading.rules import DEFAULT_RULES, PROTOCOLS, MediaRules
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.features import restore_rows, undecoded
from trl_multimodal_rft.data.rows.fingerprint import differences, fingerprint
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer
from trl_multimodal_rft.rewards import RemoteReward


FAMILY = "qwen2_5_vl"


def chat(words: str = "What is it?") -> list[dict]:
    return [{"role": "user", "content": words}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an image in `own`, and one next to that folder."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "own").mkdir()
    image(84, 56)["image"].save(folder / "own" / "i.png")
    image(84, 56, seed=1)["image"].save(folder / "other.png")
    return folder


def rows(path) -> Dataset:
    return Dataset.from_list([{"prompt": chat(), "image": str(path)}] * 8)


def one_outside(folder) -> Dataset:
    names = ["own/i.png", "other.png", *["own/i.png"] * 6]
    return Dataset.from_list([{"prompt": chat(), "image": str(folder / name)} for name in names])


# Options


@pytest.mark.parametrize("config_class", CONFIGS.values())
def test_rules_are_options_of_every_config(config_class, tmp_path):
    own = {"use_cpu": True, "bf16": False}
    assert config_class(str(tmp_path), **own).rules == DEFAULT_RULES
    limits = (
        '{"allowed_media_protocols": ["file", "memory"], "allowed_media_folders": ["/a", "/b"], '
        '"allowed_media_domains": ["example.com"], "max_media_bytes": 5, "max_image_pixels": 6, '
        '"max_audio_seconds": 7.5, "max_video_seconds": Infinity, "max_video_pixels": 8, "media_timeout": 9}'
    )
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--media_dir", str(tmp_path)]
    (args,) = TrlParser(config_class).parse_args_and_config([*words, "--media_rules", limits])
    rules = MediaRules(("file", "memory"), ("/a", "/b"), ("example.com",), 5, 6, 7.5, math.inf, 8, 9.0, str(tmp_path))
    assert args.rules == rules and copy.deepcopy(args).rules == rules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_media_folders": "/data"}, r"`allowed_media_folders` must be a list.*write \['/data'\]"),
        ({"allowed_media_domains": ["https://a.b/c"]}, "`allowed_media_domains` has 'https://a.b/c'; write hosts"),
        ({"allowed_media_protocols": ["s3://"]}, "`allowed_media_protocols` has 's3://'; write names"),
        ({"max_audio_seconds": True}, "`max_audio_seconds` must be a number, got True"),
        ({"max_audio_seconds": [60]}, r"`max_audio_seconds` must be a number, got \[60\]"),
        ({"allowed_media_folders": 5}, "`allowed_media_folders` must be a list, got 5"),
        ({"max_media_bites": 5}, "`media_rules` has no key 'max_media_bites'. Did you mean `max_media_bytes`?"),
        ({"media_dir": "."}, "`media_rules` has no key 'media_dir'. Set the trainer's option `media_dir`"),
        ({"max_media_bytes": "5 MB"}, "`max_media_bytes` must be a number, got the text '5 MB'"),
        ({"max_media_bytes": 0}, "`max_media_bytes` must be positive, got 0"),
        ({"max_audio_seconds": math.nan}, "`max_audio_seconds` must be positive, got nan"),
        ({"media_timeout": -1.0}, "`media_timeout` must be positive, got -1.0"),
    ],
)
def test_rules_that_make_no_sense(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CONFIGS["grpo"](str(tmp_path), use_cpu=True, bf16=False, media_rules=options)


def test_references_carry_the_rules_wherever_they_stand():
    rules = MediaRules(max_media_bytes=5)
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, text("?")]}]
    data = [
        {"prompt": "What?", "image": "a.png", "audios": ["a.wav", "b.wav"]},
        {"prompt": "Is it <video>?", "video": "a.mp4"},
        {"prompt": blocks, "images": ["a.png", "b.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}]}]},
    ]
    refs = list(iter_refs(rows_to_messages(data, rules=rules)))
    assert len(refs) == 7 and all(ref.rules is rules and copy.deepcopy(ref) is ref for ref in refs)
    assert pickle.loads(pickle.dumps(refs[0])) == "<image>"


# Places


OPTIONS = {"self_check": False, "max_steps": 1, "shuffle_dataset": False}


def options_of(media_dir=None, **limits):
    return {"media_dir": media_dir, "media_rules": limits}


def by_trainer(trainer_class):
    return lambda folder, tmp_path, serve, **ours: run(
        trainer_class, FAMILY, one_outside(folder), **OPTIONS, **options_of(**ours)
    )


def by_supervised(folder, tmp_path, serve, **ours):
    outside = rows(folder / "other.png").add_column("completion", ["a cat"] * 8)
    run(
        InjectedPPO,
        FAMILY,
        rows(folder / "own" / "i.png"),
        objects={"ptx_dataset": outside},
        ptx_coef=1.0,
        **OPTIONS,
        **options_of(**ours),
    )


def by_evaluation_of_a_trainer(folder, tmp_path, serve, **ours):
    trainer = make_trainer(InjectedOurs, FAMILY, rows(folder / "own" / "i.png"), tmp_path, **options_of(**ours))
    evaluate_trainer(trainer, one_outside(folder))


def by_evaluation(folder, tmp_path, serve, **ours):
    def reward(completions, **_):
        return [0.0] * len(completions)

    config = EvaluationConfig(max_completion_length=2)
    evaluate(*load(FAMILY), one_outside(folder), reward, config, media_rules=MediaRules(**ours))


def by_reward(folder, reward, **ours):
    ignored = {"ignored_media_columns": ["image"]}
    run(InjectedOurs, FAMILY, one_outside(folder), reward=reward, **ignored, **OPTIONS, **options_of(**ours))


def by_remote_reward(folder, tmp_path, serve, **ours):
    by_reward(folder, RemoteReward(serve().url), **ours)


def by_reward_model(folder, tmp_path, serve, **ours):
    from rewards.test_reward_models import RewardModel, classifier

    by_reward(folder, RewardModel(*classifier()), **ours)


def by_experience_maker(folder, tmp_path, serve, **ours):
    from lightrft.test_experience_maker import make

    maker = make(family=FAMILY, media_rules=MediaRules(**ours))
    maker.make_experience_list(list(one_outside(folder)), max_new_tokens=2)


PLACES = {
    "grpo": by_trainer(InjectedOurs),
    "rloo": by_trainer(InjectedRLOO),
    "ppo": by_trainer(InjectedPPO),
    "supervised": by_supervised,
    "evaluation of a trainer": by_evaluation_of_a_trainer,
    "evaluation": by_evaluation,
    "remote reward": by_remote_reward,
    "reward model": by_reward_model,
    "experience maker": by_experience_maker,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_place_keeps_to_the_rules(place, folder, tmp_path, serve):
    """Covers files of other folders, and the base of relative paths, without which no file resolves."""
    message = r"row \d+, column 'image': '.*other.png' is in none of `allowed_media_folders`; add its folder"
    with pytest.raises(MediaError, match=message):
        place(folder, tmp_path, serve, allowed_media_folders=[str(folder / "own")])
    start = r"\(relative paths start from the working directory; `media_dir` names another\); correct the path"
    with pytest.raises(MediaError, match=rf"row \d+, column 'image': no such file: '{os.getcwd()}/.*png' {start}"):
        place(Path(), tmp_path, serve)
    place(Path(), tmp_path, serve, media_dir=str(folder), allowed_media_folders=[str(folder)])


def test_folder_of_relative_paths_widens_nothing(folder):
    inside = folder / "own"
    for path, media_dir in (("../other.png", inside), ("other.png", folder)):
        allowed = MediaRules(media_dir=str(media_dir))
        assert load_image(MediaRef("image", path, {}, "image", 0, allowed)).size == (84, 56)
        narrow = MediaRules(media_dir=str(media_dir), allowed_media_folders=(str(inside),))
        with pytest.raises(MediaError, match="other.png' is in none of `allowed_media_folders`"):
            load_image(MediaRef("image", path, {}, "image", 0, narrow))
    with pytest.raises(ValueError, match=f"`media_dir` is '{folder}/nowhere', which isn't a folder"):
        MediaRules(media_dir=str(folder / "nowhere"))
    with pytest.raises(MediaError, match=rf"'{folder}/b.png' \(relative paths start from `media_dir`, '{folder}'\)"):
        load_image(MediaRef("image", "b.png", {}, "image", 3, MediaRules(media_dir=str(folder))))


def test_relative_paths_in_every_form(folder, monkeypatch):
    """Covers blocks, features and their results in functions, frames, archives, and a path of the home folder."""
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
    before = fingerprint(rows("i.png"), str(tmp_path))
    absolute = fingerprint(rows(tmp_path / "i.png"))
    assert before == absolute != fingerprint(rows("i.png"))
    (tmp_path / "i.png").write_bytes(b"three")
    assert differences(before, fingerprint(rows("i.png"), str(tmp_path)))


def test_protocols_of_the_user(folder):
    with fsspec.open("memory://i.png", "wb") as file:
        file.write((folder / "own" / "i.png").read_bytes())
    run(
        InjectedOurs,
        FAMILY,
        rows("memory://i.png"),
        media_rules={"allowed_media_protocols": [*PROTOCOLS, "memory"]},
        **OPTIONS,
    )


def test_logged_media_keep_the_rules_of_the_run(folder):
    """The logs may show what the policy may see, also media larger than the default limit."""
    rules = MediaRules(max_image_pixels=10**9)
    medium = media_file(MediaRef("image", folder / "own" / "i.png", {}, "image", 0, rules), 1e6)
    assert pickle.loads(pickle.dumps(medium)).ref().rules == rules
