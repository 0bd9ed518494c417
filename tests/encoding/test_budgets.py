# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Budgets of pixels and frames, compared with the processors' own arguments, qwen-vl-utils and FFmpeg's frames."""

import math
import re

import numpy as np
import pytest
import torch
from helpers import clips
from helpers.chats import RATE, audio, image, mosaic, text
from helpers.chats import chat as user
from helpers.encoding import assert_same_features
from helpers.families import ALL_FAMILIES, encode
from helpers.files import write_film
from helpers.folders import ROOT
from helpers.tools import GRPO, Scripted, shows, talking
from helpers.trainer_utils import AS_SHIPPED, TRAINERS, image_rows, length_and_sum, load, make_trainer, run, text_rows
from PIL import Image
from qwen_vl_utils import process_vision_info
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.media import budgeted_size, decode_media
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards.model import RewardModel


PICTURE = image(160, 100)["image"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    PICTURE.save(folder / "picture.png")
    write_film(folder / "film.mp4")  # 20 frames in two seconds
    return folder


def encoded(family, *blocks, **budgets):
    model, processor = ALL_FAMILIES[family].build()
    rules = MediaRules(**budgets)
    [row] = rows_to_messages([{"prompt": user(*blocks, text("What is it?"))}], rules=rules)
    return encode_prompt(row["prompt"], processor, model)


def decoded(family, block, **budgets):
    """Returns a medium as the processor gets it, the metadata of a video, and arguments of the processor."""
    _, processor = ALL_FAMILIES[family].build()
    [row] = rows_to_messages([{"prompt": user(dict(block), text("?"))}], rules=MediaRules(**budgets))
    [ref] = iter_refs(row["prompt"])
    media, kwargs = decode_media([ref], processor, "raise")
    metadata = kwargs.get("videos_kwargs", {}).get("video_metadata", [[None]])[0][0]
    return media[id(ref)], metadata, kwargs


# Sizes


def test_sizes_are_within_the_budget():
    rng = np.random.default_rng(0)
    for height, width, most in rng.integers(1, 3000, (500, 3)) * [1, 1, 100]:
        tall, wide = budgeted_size(height, width, {"max_pixels": most})
        assert tall * wide <= most and (tall, wide) <= (height, width)
        if (tall, wide) != (height, width) and min(tall, wide) > 1:  # as EasyR1 resizes
            scale = math.sqrt(most / (width * height))
            assert (tall, wide) == (int(height * scale), int(width * scale))
        tall, wide = budgeted_size(height, width, {"min_pixels": most})
        assert tall * wide >= min(most, height * width)
        tall, wide = budgeted_size(height, width, {"min_pixels": most, "max_pixels": most})
        assert tall * wide <= most
    assert budgeted_size(1, 10_000, {"max_pixels": 100}) == (1, 100)


def test_multiples_are_those_to_which_processors_round():
    rng = np.random.default_rng(1)
    for height, width in rng.integers(100, 1500, (300, 2)).tolist():
        least = 56 * 56 * 30
        most = 56 * 56 * 150
        size = budgeted_size(height, width, {"min_pixels": least, "max_pixels": most}, 28)
        expected = smart_resize(height, width, 28, least, most)
        assert size == expected or (size == (height, width) and smart_resize(*size, 28, 1, 1e9) == expected)


# Images


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"])
@pytest.mark.parametrize("budgets", [{"max_pixels": 4096}, {"min_pixels": 40_000, "max_pixels": 90_000}], ids=str)
def test_qwen_gets_what_qwen_vl_utils_gives(name, budgets, files):
    ours = encoded(name, {"type": "image", "path": str(files / "picture.png")}, **budgets)
    _, processor = ALL_FAMILIES[name].build()
    own = processor.image_processor
    limits = {"min_pixels": own.size["shortest_edge"], "max_pixels": own.size["longest_edge"], **budgets}
    block = {"type": "image", "image": str(files / "picture.png"), **limits}
    [resized], _ = process_vision_info([user(block)], image_patch_size=own.patch_size)
    expected = encode(processor, user({"type": "image", "image": resized}, text("What is it?")), do_resize=False)
    assert_same_features(ours, expected)
    # The same grid as by the processor's own argument
    size = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    by_size = encode(processor, user(image_of(PICTURE), text("What is it?")), processor_kwargs={"size": size})
    assert torch.equal(ours.media["image_grid_thw"], by_size["image_grid_thw"])
    pixels = ours.media["image_grid_thw"].prod() * own.patch_size**2
    assert limits["min_pixels"] <= pixels <= limits["max_pixels"]


def image_of(picture):
    return {"type": "image", "image": picture}


# The size that the processor gets, and its arguments
OTHERS = {
    "llava": ((80, 50), {}),
    "gemma3": ((80, 50), {}),
    "mistral3": ((80, 50), {}),
    "glm4v": ((56, 28), {}),
    "ernie4_5_vl_moe": ((56, 28), {}),
    "internvl": ((56, 35), {"max_patches": 2}),
    "ovis2": ((56, 35), {"max_patches": 2}),
    "idefics3": ((50, 31), {"size": {"longest_edge": 28}}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_processors_get_images_within_the_budget(name):
    size, kwargs = OTHERS[name]
    most = {"internvl": 28 * 28 * 2 + 400, "ovis2": 28 * 28 * 2 + 400, "idefics3": 1600}.get(name, 80 * 50 + 20)
    ours = encoded(name, image_of(PICTURE), max_pixels=most)
    _, processor = ALL_FAMILIES[name].build()
    assert size[0] * size[1] <= most < PICTURE.width * PICTURE.height
    block = image_of(PICTURE.resize(size, Image.Resampling.BICUBIC))
    options = {"processor_kwargs": {"images_kwargs": kwargs}} if kwargs else {}
    assert_same_features(ours, encode(processor, user(block, text("What is it?")), **options))
    medium, _, given = decoded(name, image_of(PICTURE), max_pixels=most)
    assert medium.size == size and given.get("images_kwargs", {}) == kwargs


def test_gemma4_gets_fewer_tokens():
    _, processor = ALL_FAMILIES["gemma4"].build()
    own = processor.image_processor
    own.max_soft_tokens = 280
    side = own.patch_size * own.pooling_kernel_size
    [row] = rows_to_messages([{"prompt": user(image_of(PICTURE))}], rules=MediaRules(max_pixels=150 * side**2))
    _, kwargs = decode_media(list(iter_refs(row["prompt"])), processor, "raise")
    assert kwargs == {"images_kwargs": {"max_soft_tokens": 140}}


def test_a_budget_below_a_token_is_refused(files):
    with pytest.raises(MediaError, match="`max_pixels` of 700 is less than the 28 x 28 pixels of a token; raise it"):
        encoded("qwen2_5_vl", image_of(PICTURE), max_pixels=700)
    with pytest.raises(MediaError, match="`max_frames` of 1 is less than the two frames of a token; raise it"):
        encoded("qwen2_5_vl", {"type": "video", "path": str(files / "film.mp4")}, max_frames=1)


# Videos


FILM = "H.264"


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Returns a path and FFmpeg's 60 frames of six seconds."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    data = clips.encoded(FILM)
    path.write_bytes(data)
    return str(path), clips.shown(data)


@pytest.mark.parametrize(
    ("budgets", "indices"),
    [
        ({"video_fps": 1.0}, np.linspace(0, 59, 6)),
        ({"video_fps": 2.0}, np.linspace(0, 59, 12)),
        ({"video_fps": 2.0, "max_frames": 4}, np.linspace(0, 59, 4)),
        ({"max_frames": 6}, np.linspace(0, 59, 6)),
    ],
    ids=str,
)
def test_frames_are_those_of_ffmpeg(budgets, indices, clip):
    path, frames = clip
    expected = frames[indices.round().astype(int)]
    block = {"type": "video", "path": path}
    medium, metadata, _ = decoded("qwen2_5_vl", {**block, "resized_height": 56, "resized_width": 84}, **budgets)
    assert metadata["frames_indices"] == indices.round().astype(int).tolist() and metadata["fps"] == 10
    assert len(medium) == len(indices)
    medium, metadata, _ = decoded("internvl", block, **budgets)
    assert len(medium) == len(indices) and metadata["fps"] == 10
    assert np.array_equal(medium, frames[metadata["frames_indices"]])
    if "max_frames" not in budgets:  # transformers' rule rounds down
        spacing = np.arange(0, 60, 60 / len(indices)).astype(int)
        assert np.array_equal(medium, frames[spacing])
    else:
        assert metadata["frames_indices"][-1] >= 50
    assert expected.shape == medium.shape


def test_times_are_those_of_the_frames(clip):
    """Qwen3-VL prints the time of each two frames, Qwen2.5-VL's positions follow from the seconds between them."""
    path, frames = clip
    block = {"type": "video", "path": path}
    ours = encoded("qwen3_vl", block, video_fps=1.0, max_pixels=64 * 64)
    _, processor = ALL_FAMILIES["qwen3_vl"].build()
    words = processor.tokenizer.decode(ours.input_ids)
    indices = np.linspace(0, 59, 6).round().astype(int)
    times = [(indices[i] + indices[i + 1]) / 20 for i in (0, 2, 4)]
    assert [float(each) for each in re.findall(r"<([\d.]+) seconds>", words)] == pytest.approx(times, abs=0.051)
    media = encoded("qwen2_5_vl", block, video_fps=1.0, max_pixels=56 * 56).media
    assert media["second_per_grid_ts"].tolist() == [2.0] and media["video_grid_thw"].tolist() == [[3, 2, 4]]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_have_the_size_of_qwen_vl_utils(name, clip):
    own = ALL_FAMILIES[name].build()[1].video_processor
    size = {"max_pixels": 64 * 64, "min_pixels": 56 * 56}
    medium, metadata, kwargs = decoded(name, {"type": "video", "path": clip[0]}, video_fps=1.0, **size)
    block = {"type": "video", "video": clip[0], "fps": 1.0, **size}
    _, [expected] = process_vision_info([user(block)], image_patch_size=own.patch_size)
    assert torch.equal(medium, expected.to(torch.uint8)) or (medium.float() - expected).abs().max() <= 1
    assert medium.shape[-2] * medium.shape[-1] <= 64 * 64 and kwargs["videos_kwargs"]["do_resize"] is False


@pytest.mark.parametrize("name", ["internvl", "smolvlm", "glm4v", "llava_onevision"])
def test_frames_of_other_families_are_within_the_budget(name, clip):
    medium, _, _ = decoded(name, {"type": "video", "path": clip[0]}, max_pixels=3000, max_frames=4)
    assert medium.shape[0] <= 4 and medium.shape[1] * medium.shape[2] <= 3000
    encoded(name, {"type": "video", "path": clip[0]}, max_pixels=3000, max_frames=4)


# The table in the docs


def area(medium) -> int:
    width, height = medium.size
    return width * height


def pixels_of_a_block(files):
    block = {"type": "image", "path": str(files / "picture.png")}
    for family in ("qwen2_5_vl", "llava"):
        assert 6000 < area(decoded(family, {**block, "max_pixels": 8000}, max_pixels=4000)[0]) <= 8000
        assert area(decoded(family, {**block, "max_pixels": 4000}, max_pixels=8000)[0]) <= 4000
        assert area(decoded(family, {**block, "max_pixels": 4000}, min_pixels=8000)[0]) <= 4000
        assert area(decoded(family, {**block, "min_pixels": 40_000}, max_pixels=20_000)[0]) >= 40_000 * 0.99


def size_of_a_block(files):
    block = {"type": "image", "path": str(files / "picture.png"), "resized_height": 112, "resized_width": 140}
    assert decoded("qwen2_5_vl", block, max_pixels=4000)[0].size == (140, 112)


def film(files, family="qwen2_5_vl", budgets=None, **options):
    """Returns the number of frames."""
    return len(decoded(family, {"type": "video", "path": str(files / "film.mp4"), **options}, **(budgets or {}))[0])


def rate_of_a_block(files):
    for family in ("qwen2_5_vl", "internvl"):
        assert film(files, family, {"video_fps": 2.0}, fps=5.0) == 10
        assert film(files, family, {"video_fps": 2.0, "max_frames": 8}, fps=5.0) == 8


def number_of_a_block(files):
    for family in ("qwen2_5_vl", "internvl"):
        assert film(files, family, {"video_fps": 2.0, "max_frames": 2}, nframes=6) == 6


def most_of_a_block(files):
    for family in ("qwen2_5_vl", "internvl"):
        assert film(files, family, {"video_fps": 5.0, "max_frames": 4}, max_frames=8) == 8
        assert film(files, family, {"video_fps": 5.0, "max_frames": 8}, max_frames=4) == 4


def least_of_a_block(files):
    assert film(files, budgets={"video_fps": 5.0, "max_frames": 4}, min_frames=6) == 6


def list_of_frames(files):
    frames = mosaic(9, 56, 84, 0)
    for family in ("qwen2_5_vl", "internvl"):
        medium, metadata, _ = decoded(family, {"type": "video", "video": frames, "sample_fps": 3.0}, video_fps=1.0)
        assert len(medium) == 9
        medium, metadata, _ = decoded(
            family, {"type": "video", "video": list(frames), "sample_fps": 3.0}, max_frames=4
        )
        assert metadata["frames_indices"] == [0, 3, 5, 8] and metadata["fps"] == 3 and len(medium) == 4


def own_rule_for_frames(files):
    model, processor = ALL_FAMILIES["internvl"].build()
    processor.video_processor.do_sample_frames = True
    processor.video_processor.num_frames = 10

    def frames(**budgets):
        [row] = rows_to_messages(
            [{"prompt": user({"type": "video", "path": str(files / "film.mp4")})}], rules=MediaRules(**budgets)
        )
        [ref] = iter_refs(row["prompt"])
        return decode_media([ref], processor, "raise")[1]["videos_kwargs"]["video_metadata"][0][0]["frames_indices"]

    own = frames()
    assert len(own) == 10 and frames(max_frames=20) == own
    assert frames(max_frames=4) == [own[i] for i in (0, 3, 6, 9)]
    assert len(frames(video_fps=3.0)) == 6


def own_limits_of_pixels(files):
    block = {"type": "image", "path": str(files / "picture.png")}
    _, processor = ALL_FAMILIES["qwen2_5_vl"].build()
    assert area(decoded("qwen2_5_vl", block, min_pixels=50_000)[0]) > processor.image_processor.size["longest_edge"]
    limit = ALL_FAMILIES["glm4v"].build()[1].image_processor
    [[_, height, width]] = encoded("glm4v", block, min_pixels=50_000).media["image_grid_thw"].tolist()
    assert height * width * limit.patch_size**2 <= limit.size["longest_edge"] < 50_000


def refused_pixels(files):
    for block in (
        {"type": "image", "path": str(files / "picture.png")},
        {"type": "video", "path": str(files / "film.mp4")},
    ):
        with pytest.raises(MediaError, match="`max_image_pixels`"):
            decoded("qwen2_5_vl", block, max_image_pixels=6000, max_pixels=4000)


def refused_seconds(files):
    with pytest.raises(MediaError, match="`max_video_seconds`"):
        film(files, budgets={"max_video_seconds": 1.0, "max_frames": 2})


def refused_frames(files):
    bound = {"max_video_pixels": 10 * 4000}
    with pytest.raises(MediaError, match="`max_video_pixels`"):
        film(files, "internvl", bound)
    assert film(files, "internvl", {**bound, "max_pixels": 2000}) == 20
    assert film(files, "internvl", {**bound, "max_frames": 6}) == 6


def long_sounds(files):
    """Those of videos are in test_sound_of_videos.py."""
    block = {"type": "audio", "audio": {"array": audio(1.5)["audio"], "sampling_rate": RATE}}
    with pytest.raises(MediaError, match="audio_overlong"):
        decoded("qwen2_audio", block, max_frames=2, video_fps=1.0, max_pixels=100)


def reward_models(files):
    reward = RewardModel.__new__(RewardModel)
    seen = []
    reward.model = load("qwen2_5_vl")[0]
    reward.batch_size = 1
    reward.config = reward.model.config
    reward._encode_batch = lambda prompts, completions: seen.extend(iter_refs(prompts[0])) or ({}, [])
    rules = MediaRules(max_pixels=4000, max_frames=2, use_audio_in_video=True, max_image_pixels=16_001)
    reward([user(text("?"))], ["yes"], rules, image=[str(files / "picture.png")])
    assert [ref.rules for ref in seen] == [MediaRules(max_image_pixels=16_001)]


ROWS = {
    "`max_pixels` or `min_pixels` of a block": [pixels_of_a_block],
    "`resized_height` and `resized_width` of a block (Qwen)": [size_of_a_block],
    "`fps` of a block": [rate_of_a_block],
    "`nframes` or `max_frames` of a block": [number_of_a_block, most_of_a_block],
    "`min_frames` of a block (Qwen)": [least_of_a_block],
    "a list of frames": [list_of_frames],
    "a processor's own rule for frames": [own_rule_for_frames],
    "a processor's own limits of pixels": [own_limits_of_pixels],
    "`max_image_pixels`, `max_video_seconds`": [refused_pixels, refused_seconds, refused_frames],
    "`audio_overlong`": [long_sounds],
    "a reward model": [reward_models],
}


def test_the_table_has_these_rows():
    page = ROOT.joinpath("docs", "datasets.md").read_text()
    table = page.split("### Which value wins")[1].split("\n## ")[0]
    assert [line.split(" | ")[0].lstrip("| ") for line in table.splitlines() if line.startswith("| ")][1:] == [*ROWS]


@pytest.mark.parametrize("row", ROWS)
def test_what_wins(row, files):
    for check in ROWS[row]:
        check(files)


# Runs


def test_budgets_that_make_no_sense():
    with pytest.raises(ValueError, match="`min_pixels` of 9 is above `max_pixels` of 4; correct them"):
        EvaluationConfig(min_pixels=9, max_pixels=4)
    with pytest.raises(ValueError, match=r"enlarges each image to more pixels than .* \(89,478,485\); lower it"):
        EvaluationConfig(min_pixels=99_999_999)
    with pytest.raises(ValueError, match="`max_frames` must be positive, got 0"):
        EvaluationConfig(max_frames=0)


def largest(dataset, kind, tmp_path, **options) -> int:
    """Returns the most pixels of an image that the model sees in a run of a trainer."""
    seen = []

    def spy(module, args, kwargs):
        grid = kwargs.get("image_grid_thw")
        if grid is not None:
            seen.append(int(grid.prod(-1).max()) * 14**2)

    model, processor = load("qwen2_5_vl")
    model.register_forward_pre_hook(spy, with_kwargs=True)
    options |= {"per_device_train_batch_size": 4, "reward": None if kind == "sft" else length_and_sum}
    objects = {"model": model, "processing_class": processor}
    make_trainer(TRAINERS[kind], "qwen2_5_vl", dataset, tmp_path, objects=objects, **options).train()
    return max(seen)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo", "sft"])
def test_every_trainer_has_the_budgets(kind, tmp_path):
    """Also in the workers that read ahead, and in the self-check."""
    options = {"max_steps": 2, **AS_SHIPPED} if kind == "grpo" else {"max_steps": 1}
    rows = image_rows()
    if kind == "sft":
        rows = rows.add_column("completion", [[{"role": "assistant", "content": "a cat"}]] * len(rows))
    budgets = {"max_pixels": 3 * 28 * 28}
    assert largest(rows, kind, tmp_path, **options, **budgets) <= 3 * 28 * 28


def test_an_evaluation_has_its_own_or_the_given_budgets():
    model, processor = load("qwen2_5_vl")
    for config, most in ((EvaluationConfig(max_pixels=6 * 28 * 28), 6), (EvaluationConfig(), 1)):
        seen = []

        def spy(module, args, kwargs, seen=seen):
            grid = kwargs.get("image_grid_thw")
            if grid is not None:
                seen.append(int(grid.prod(-1).max()) // 4)

        hook = model.register_forward_pre_hook(spy, with_kwargs=True)
        rules = MediaRules(max_pixels=2 * 28 * 28)
        evaluate(model, processor, image_rows(1), length_and_sum, config, media_rules=rules)
        hook.remove()
        assert max(seen) == most


def test_tools_return_media_within_the_budget():
    objects = talking("qwen2_5_vl")
    model = objects["model"]
    seen = []

    def spy(module, args, kwargs):
        grid = kwargs.get("image_grid_thw")
        if grid is not None:
            seen.extend((grid.prod(-1) * 14**2).tolist())

    model.register_forward_pre_hook(spy, with_kwargs=True)
    objects["tools"] = [shows([image(112, 84)], [image(84, 112)], [image(56, 56)])]
    options = {"max_completion_length": 300, "max_steps": 1, "max_pixels": 4 * 28 * 28}
    run(GRPO, "qwen2_5_vl", text_rows(), objects=objects, sampler=Scripted, **options)
    assert max(seen) == 4 * 28 * 28
