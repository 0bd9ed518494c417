# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions about pictures: their kinds and answers, and that held-out pictures are none of training."""

from collections import Counter

from helpers.real_models import REAL
from sight_tasks import pictured_shapes

from trl_multimodal_rft.rewards import accuracy_reward


pytestmark = REAL


def pixels(rows):
    return {image.tobytes() for image in rows["image"]}


def test_pictured_shapes():
    splits = pictured_shapes(train_rows=400, test_rows=400)
    train = splits["train"]
    test = splits["test"]
    for rows in (train, test):
        assert Counter(rows["kind"]) == {"yes or no": 200, "shape": 100, "colour": 100}
        assert len(set(rows["solution"])) == 13
    assert not pixels(train) & pixels(test)
    completions = [[{"role": "assistant", "content": text}] for text in train["described"]]
    assert accuracy_reward(completions, train["solution"]) == [1.0] * 400
    named = [row for row in train.remove_columns("image") if row["kind"] != "yes or no"]
    assert all(row["solution"] in row["described"].partition(". Answer: ")[0].split() for row in named)
    again = pictured_shapes(train_rows=400, test_rows=400, seed=1)["train"]
    assert again["solution"] != train["solution"]
