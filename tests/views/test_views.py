# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views of decoded media: each function against its definition, and prompts under a view."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.trainer_utils import TRAINERS, image_rows, make_trainer, with_media
from PIL import Image

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.rollout.view_prompts import view_prompts
from trl_multimodal_rft.views.view_options import RolloutView, changed_media, view_option
from trl_multimodal_rft.views.views import VIEWS, View, ViewType, as_view


GENERATOR = np.random.default_rng(0)
PICTURE = Image.fromarray(GENERATOR.integers(1, 255, (30, 44, 3), dtype=np.uint8))
FRAMES = GENERATOR.integers(1, 255, (6, 20, 28, 3), dtype=np.uint8)
SOUND = GENERATOR.standard_normal(4000).astype(np.float32)
MEDIA = {"image": PICTURE, "video": FRAMES, "audio": SOUND}


class Unused:
    """Generator whose random numbers nothing may draw."""

    def __getattr__(self, name):
        raise LookupError(name)


def draws_numbers(kind):
    """Returns whether a view draws random numbers."""
    try:
        kind.function(SOUND if kind.modalities == ("audio",) else FRAMES, Unused())
    except LookupError:
        return True
    return False


def pixels(medium):
    return medium.permute(0, 2, 3, 1).numpy() if isinstance(medium, torch.Tensor) else np.asarray(medium)


@pytest.mark.parametrize("name", VIEWS)
def test_type_and_size_stay_and_seeds_decide(name):
    spec = as_view(name)
    applied = [(kind, medium) for kind, medium in MEDIA.items() if spec.applies_to(kind)]
    assert applied
    for kind, medium in [*applied, ("video", torch.from_numpy(FRAMES).permute(0, 3, 1, 2))]:
        if not spec.applies_to(kind):
            continue
        before = pixels(medium).copy()
        views = [
            spec.seeded(*seed)(medium, place) for seed, place in (((1, 2), 0), ((1, 2), 0), ((1, 3), 0), ((1, 2), 1))
        ]
        assert {type(each) for each in views} == {type(medium)}
        assert {pixels(each).shape for each in views} == {before.shape}
        assert {pixels(each).dtype for each in views} == {before.dtype}
        assert np.array_equal(pixels(medium), before)  # unchanged
        assert np.array_equal(pixels(views[0]), pixels(views[1])) and not np.array_equal(pixels(views[0]), before)
        if draws_numbers(VIEWS[name]):
            assert not any(np.array_equal(pixels(views[0]), pixels(each)) for each in views[2:])


def test_a_view_may_be_a_part_of_its_medium_in_reverse():
    """Torch takes no array with a negative stride."""
    mirror = View(ViewType("mirror", None, lambda frames, rng: frames[:, :, ::-1]))
    shown = mirror(torch.from_numpy(FRAMES).permute(0, 3, 1, 2), 0)
    assert np.array_equal(pixels(shown), FRAMES[:, :, ::-1])


def test_blank_is_silence_or_grey():
    assert set(np.unique(as_view("blank")(PICTURE, 0))) == set(np.unique(as_view("blank")(FRAMES, 0))) == {128}
    assert not as_view("blank")(SOUND, 0).any()


def test_others_take_duration_and_size():
    other_row = as_view("other_row")
    assert other_row(np.zeros(7), 0, np.arange(3.0)).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert other_row(np.zeros(2), 0, np.arange(9.0)).tolist() == [0, 1]
    picture = Image.new("RGB", (40, 20), (200, 10, 10))
    assert other_row(Image.new("RGB", (14, 28)), 0, picture).getpixel((13, 27)) == (200, 10, 10)
    frames = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 6, 3), np.uint8)
    taken = other_row(np.zeros((3, 4, 5, 3), np.uint8), 0, frames)
    assert taken.shape == (3, 4, 5, 3) and taken[:, 0, 0, 0].tolist() == [0, 2, 4]
    tensors = [torch.from_numpy(each).permute(0, 3, 1, 2) for each in (np.zeros((3, 4, 5, 3), np.uint8), frames)]
    assert torch.equal(other_row(tensors[0], 0, tensors[1]).permute(0, 2, 3, 1), torch.from_numpy(taken))


def test_masks_whole_patches():
    big = np.full((2, 140, 280, 3), 7, np.uint8)
    masked = as_view("mask_patches(ratio=0.3)").seeded(4)(big, 0)
    patches = masked[0].reshape(10, 14, 20, 14, 3)
    per_patch = patches.min((1, 3, 4)), patches.max((1, 3, 4))
    assert np.array_equal(*per_patch) and set(np.unique(per_patch[0])) == {0, 7}
    assert abs((per_patch[0] == 0).mean() - 0.3) < 0.1
    assert np.array_equal(masked[0], masked[1])
    assert np.array_equal(as_view("mask_patches(ratio=1e-9)")(PICTURE, 0), PICTURE)
    assert not np.any(as_view("mask_patches(ratio=1.0)")(PICTURE, 0))


def test_noise_has_the_variance_of_the_diffusion():
    grey = np.full((1, 400, 400, 3), 128, np.uint8)
    for step in (10, 200, 400):
        kept = 1.0
        for i in range(step + 1):
            kept *= 1 - (1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6 - 12 * i / 999)))
        noisy = as_view(f"diffusion_noise(step={step})")(grey, 0) / 255
        inside = (noisy > 0) & (noisy < 1)
        assert np.median(noisy) == pytest.approx(math.sqrt(kept) * 128 / 255, abs=0.01)
        quartile = np.quantile(noisy[..., 0], 0.75) - np.median(noisy)
        if math.sqrt(kept) * 0.5 + 0.6745 * math.sqrt(1 - kept) < 1:
            assert quartile == pytest.approx(0.6745 * math.sqrt(1 - kept), abs=0.01)
        assert inside.any()


def test_frames_are_shuffled_dropped_and_cropped():
    assert sorted(each.tobytes() for each in as_view("shuffle_frames")(FRAMES, 0)) == sorted(
        f.tobytes() for f in FRAMES
    )
    dropped = as_view("drop_frames(ratio=0.5)").seeded(1)(FRAMES, 0)
    places = [next(j for j, frame in enumerate(FRAMES) if np.array_equal(frame, each)) for each in dropped]
    assert places[0] == 0 and all(place in (i, places[i - 1]) for i, place in enumerate(places) if i)
    assert np.array_equal(as_view("drop_frames(ratio=1.0)")(FRAMES, 0), FRAMES[:1].repeat(6, 0))
    gradient = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    cropped = np.asarray(as_view("crop(scale=0.5)")(Image.fromarray(gradient.copy()), 0)).astype(int)
    assert cropped.max() - cropped.min() == pytest.approx(100, abs=3)


def test_sounds_are_masked_and_noisy():
    masked = as_view("mask_audio(ratio=0.5, segments=40)")(SOUND, 0).reshape(40, 100)
    silent = ~masked.any(1)
    assert 8 < silent.sum() < 32 and np.array_equal(masked[~silent], SOUND.reshape(40, 100)[~silent])
    added = as_view("noise(level=0.5)")(SOUND, 0) - SOUND
    assert math.sqrt(np.mean(added**2)) == pytest.approx(0.5 * math.sqrt(np.mean(SOUND**2)), rel=0.05)


def flip(medium, rng, times: int = 1):
    return medium[:, :, :: (-1) ** times]


def test_views_of_users(tmp_path, monkeypatch):
    assert np.array_equal(as_view(flip)(PICTURE, 0), np.asarray(PICTURE)[:, ::-1])
    (tmp_path / "my_views.py").write_text("def half(medium, rng, share=0.5):\n    return medium * share\n")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(as_view("my_views.half(share=0.0)")(SOUND, 0), 0 * SOUND)
    with pytest.raises(ValueError, match=r"returned the shape \(1, 30, 22, 3\) for the shape \(1, 30, 44, 3\)"):
        as_view(lambda medium, rng: medium[:, :, ::2])(PICTURE, 0)


def test_strength_follows_a_schedule():
    assert as_view("diffusion_noise").scaled(0.25).settings == {"step": 125}
    assert as_view("mask_patches(ratio=0.4)").scaled(0.5).settings == {"ratio": 0.2}
    assert np.array_equal(as_view("mask_patches").scaled(0.0)(PICTURE, 0), PICTURE)
    with pytest.raises(ValueError, match="'shuffle_frames' has no strength"):
        as_view("shuffle_frames").scaled(0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask_patch", "Did you mean `mask_patches`"),
        ("crop(size=1)", "'crop' has no setting 'size'"),
        ("a.b", "There is no view"),
        ("crop(scale=0)", "`scale` of 'crop' must be above 0 and below 1, got 0; the default is 0.5"),
        ("mask_patches(ratio=0.0)", "`ratio` of 'mask_patches' must be above 0 and at most 1, got 0.0"),
        ("diffusion_noise(step=1000)", "`step` of 'diffusion_noise' must be between 1 and 999, got 1000"),
        ("noise(level=0)", "`level` of 'noise' must be above 0, got 0"),
        ("mask_audio(segments=0)", "`segments` of 'mask_audio' must be at least 1, got 0"),
    ],
)
def test_unknown_views_and_settings_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        as_view(name)
    with pytest.raises(ValueError):
        view_option(RolloutView, "rollout_view", name)


USER = {"role": "user", "content": "What?"}
PICTURES = {"image": {"image": "a.png"}, "text alone": {}}
PICTURES["image "] = {"prompt": [{**USER, "content": [{"type": "image", "image": "a.png"}]}]}
OPTIONS = {"rollout_view": "grpo", "contrast_view": "rloo", "loss_view": "ppo", "teacher_view": "distillation"}
OPTIONS |= {"student_view": "distillation", "rejected_view": "dpo"}


@pytest.mark.parametrize("held", PICTURES)
@pytest.mark.parametrize("option", OPTIONS)
def test_views_that_change_no_medium_of_the_rows_are_refused(option, held, tmp_path):
    kind = OPTIONS[option]
    row = {"prompt": [USER], "chosen": "A", "rejected": "B", **PICTURES[held]}
    options = {"reward": None} if kind in ("dpo", "distillation") else {}
    options[option] = "mask_audio(kl_coef=0.1)" if option == "loss_view" else "mask_audio"
    with pytest.raises(
        ValueError, match=f"`{option}` changes audio, but prompts hold {held.strip()}; remove `{option}`"
    ):
        make_trainer(TRAINERS[kind], "qwen2_5_omni", Dataset.from_list([row] * 8), tmp_path, **options)


def test_only_views_of_sounds_change_the_sound_of_videos(monkeypatch):
    monkeypatch.setitem(VIEWS, "mirror", ViewType("mirror", None, flip, ("image",)))
    config = {"rollout_view": "mirror", "contrast_view": "mask_audio", "loss_view": "shuffle_frames"}
    changes = {"`rollout_view`": {"image"}, "`contrast_view`": {"audio"}, "`loss_view`": {"video"}}
    assert changed_media({**config, "use_audio_in_video": False}) == changes
    changes["`contrast_view`"] = {"audio", "video"}
    assert changed_media({**config, "use_audio_in_video": True}) == changes


def test_views_of_media_that_only_reading_tells(tmp_path, caplog):
    """Streams get a warning with their first batch. Blocks are read."""
    rows = image_rows()
    options = {"max_steps": 1, "rollout_view": "mask_audio"}
    blocks = Dataset.from_list([{"prompt": [{**USER, "content": [{"type": "image", "path": "a.png"}]}]}] * 8)
    with pytest.raises(ValueError, match="`rollout_view` changes audio, but prompts hold image"):
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", blocks, tmp_path, **options)
    for dataset in (rows.with_transform(lambda batch: batch), rows.to_iterable_dataset()):
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", dataset, tmp_path, **options)
        assert not any("changes audio" in each for each in caplog.messages)
    trainer.train()
    assert ["changes audio, but prompts hold image" in each for each in caplog.messages].count(True) == 1


def test_prompts_of_a_rollout(tmp_path):
    """Each distinct prompt is encoded once, text stays the same object, and another row's medium is the next one's."""
    rows = image_rows(8).select([0, 4])  # of one size
    prompts = [*rows["prompt"], [{"role": "user", "content": "Is there a bird?"}]]
    rows = with_media(Dataset.from_list([{"prompt": each} for each in prompts]), "image", [*rows["image"], None])
    options = {"per_device_train_batch_size": 6, "num_generations": 2, "shuffle_dataset": False}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path, **options)
    rollout = trainer._prompt(next(iter(trainer.get_train_dataloader())))
    first, second, text = rollout.prompts[::2]
    views = {name: view_prompts(rollout, as_view(name), trainer.prompts) for name in VIEWS}
    for prompts in views.values():
        assert prompts[4:] == [text] * 2
        assert [prompts[i] is prompts[i + 1] for i in range(5)] == [True, False, True, False, True]
        pairs = zip(prompts, rollout.prompts, strict=True)
        assert all(torch.equal(own.input_ids, given.input_ids) for own, given in pairs)
    assert views["noise"] == views["shuffle_frames"] == rollout.prompts
    others = [each.media["pixel_values"] for each in views["other_row"][:4:2]]
    assert torch.equal(others[0], second.media["pixel_values"]) and torch.equal(others[1], first.media["pixel_values"])
    black = as_view("mask_patches(ratio=1.0)").seeded(trainer.args.seed, 0)
    blank = (view_prompts(rollout, each, trainer.prompts)[0] for each in (black, as_view("blank")))
    means = [each.media["pixel_values"].mean().item() for each in blank]
    assert means[0] < means[1] < 0.5
