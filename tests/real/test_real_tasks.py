# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Questions about pictures: their kinds and answers, and that held-out pictures are none of training."""

from collections import Counter

from helpers.real_models import REAL
from sight_tasks import negated, pictured_shapes

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
    for row in train.remove_columns("image"):
        seen, *comparison, answer = row["described"].split(". ")
        assert row["caption"] == f"{seen}."
        if row["kind"] == "yes or no":
            question = row["prompt"][0]["content"]
            words = comparison[0].split()
            assert words[0] in seen.split()
            assert (words[0] == words[-1]) == ("not" not in words)
            assert words[-1] in question
            assert row["solution"] == ("yes" if negated(question) == ("not" in words) else "no")
        else:
            assert row["solution"] in seen.split()
            assert not comparison
        assert answer == f"Answer: {row['solution']}"


def test_wording_says_nothing_about_the_answer():
    rows = pictured_shapes(train_rows=400, test_rows=400)["test"].remove_columns("image")
    asked = Counter(
        (row["solution"], negated(row["prompt"][0]["content"])) for row in rows if row["kind"] == "yes or no"
    )
    assert asked == dict.fromkeys([("yes", False), ("yes", True), ("no", False), ("no", True)], 50)


def test_each_seed_draws_other_questions():
    train = pictured_shapes(train_rows=400, test_rows=400)["train"]
    again = pictured_shapes(train_rows=400, test_rows=400, seed=1)["train"]
    assert again["solution"] != train["solution"]
