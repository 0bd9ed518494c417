# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rollout classes: the order of their fields, and moves of all of their tensors."""

import PIL.Image
import pytest
import torch
from torch.testing import assert_close

from trl_multimodal_rft.lightrft.trainer.experience import (
    Experience,
    ExperienceVL,
    clip_filter_like_weight_func,
    pin_memory,
    to,
)


pytestmark = pytest.mark.lightrft


ACTIONS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"]
VISION = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws"]
AUDIO = ["audio_values", "audio_attention_mask"]


def test_text_experience_names_all_it_needs():
    with pytest.raises(TypeError, match="'action_mask' and 'info'"):
        Experience(*range(7))
    assert issubclass(ExperienceVL, Experience)


# Moving


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def full_experience() -> ExperienceVL:
    """Every field has tensors, some of them nested."""
    image = PIL.Image.new("RGB", (2, 2))
    info = {"reward": torch.ones(2), "metrics": {"format": torch.ones(2), "parts": [torch.ones(1), "text"]}, "step": 3}
    return ExperienceVL(
        sequences=[torch.ones(4), torch.ones(5)],
        **{name: torch.ones(2, 3) for name in (*VISION, *AUDIO, *ACTIONS, "attention_mask", "action_mask")},
        raw_images=[[image], None],
        info=info,
        kl=torch.ones(2, 3),
        action_entropy=[torch.ones(3), torch.ones(2)],
        extra_media={"image_sizes": torch.ones(2, 2)},
        media_rows={"image_sizes": [1, 1]},
    )


def test_to_device_moves_everything():
    experience = full_experience()
    before = vars(experience).copy()
    assert len(tensors_in(before)) == 2 + 4 + 2 + 5 + 2 + 3 + 1 + 2 + 1
    assert experience.to_device("meta") is experience
    moved = tensors_in(vars(experience))
    assert len(moved) == len(tensors_in(before))
    assert all(tensor.is_meta for tensor in moved)
    # The inputs of the experience stay unchanged
    assert not any(tensor.is_meta for tensor in tensors_in(before))
    assert experience.raw_images == before["raw_images"]
    assert experience.media_rows == before["media_rows"]
    assert experience.info["step"] == 3
    assert experience.info["metrics"]["parts"][1] == "text"
    # Optional fields
    experience = Experience(torch.ones(1, 4), torch.ones(1, 2), *[None] * 7).to_device("meta")
    assert experience.sequences.is_meta and experience.action_log_probs.is_meta
    assert list(vars(experience).values())[2:] == [None] * 9


def test_pin_memory():
    experience = full_experience()
    before = tensors_in(vars(experience))
    assert experience.pin_memory() is experience
    after = tensors_in(vars(experience))
    if torch.cuda.is_available():
        assert all(tensor.is_pinned() for tensor in after)
    else:
        assert all(a is b for a, b in zip(after, before, strict=True))


def test_helpers_take_containers():
    tensor, other = torch.ones(2), object()
    value = {"a": [tensor, None], "b": (tensor, {"c": tensor}), "d": other, "e": 1.5}
    moved = to(value, "meta")
    assert [t.is_meta for t in tensors_in(moved)] == [True] * 3
    assert (moved["a"][1], moved["d"], moved["e"]) == (None, other, 1.5)
    assert isinstance(moved["b"], tuple)
    assert to(None, "meta") is None
    assert pin_memory(None) is None
    assert [t.shape for t in tensors_in(pin_memory(value))] == [(2,)] * 3


# Weights


@pytest.mark.parametrize("constant", [0.0, 0.1, 0.3, 0.7, 1 / 3])
def test_weights_make_up_for_groups_without_signal(constant):
    live, dead = [0.0, 1.0, 0.0], [constant] * 3
    rewards = torch.tensor([live, dead, dead, live])
    expected = torch.tensor([[2.0], [1.0], [1.0], [2.0]]).repeat(1, 3)
    assert_close(clip_filter_like_weight_func(rewards), expected, rtol=0, atol=0)
    expected = torch.tensor([[1.5], [0.5], [0.5], [1.5]]).repeat(1, 3)
    assert_close(clip_filter_like_weight_func(rewards, 1.5, lamda=0.5), expected, rtol=0, atol=0)
    assert_close(clip_filter_like_weight_func(rewards[1:3], lamda=0.5), torch.ones(2, 3), rtol=0, atol=0)


def test_weights_are_clipped_at_three():
    rewards = torch.tensor([[0.0, 1.0]] + [[1.0, 1.0]] * 4)
    assert clip_filter_like_weight_func(rewards)[:, 0].tolist() == [3, 1, 1, 1, 1]
    # Single samples have weight 1
    assert clip_filter_like_weight_func(torch.tensor([[0.3], [0.7]]), lamda=0.5).tolist() == [[1.0], [1.0]]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.long):
        weights = clip_filter_like_weight_func(torch.tensor([[0, 1], [1, 1], [0, 1]], dtype=dtype))
        assert weights.dtype == (torch.float32 if dtype == torch.long else dtype)
        assert_close(weights.double()[:, 1], torch.tensor([1.5, 1, 1.5]).double(), rtol=0, atol=0)
