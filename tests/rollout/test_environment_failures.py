# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments that fail: their trajectories are in no loss and no baseline, and are counted."""

from functools import partial
from itertools import count

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.synthetic import own_logps
from helpers.tools import GRPO, RLOO, call, play, talking
from helpers.trainer_utils import logged, relative_difference

from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rollout.environments import EnvironmentFailure


class Office:
    """The fourth is closed, and others fail when they are asked to."""

    def __init__(self, places):
        self.place = next(places)

    def reset(self, **row):
        self.how = "idle"
        if self.place == 3:
            raise RuntimeError("closed today")

    def work(self, how: str) -> str:
        """
        Works.

        Args:
            how: How.
        """
        self.how = how
        if how == "badly":
            raise ValueError("try again")
        if how == "hastily":
            raise EnvironmentFailure("burnt down")
        return "done"

    async def wait(self) -> str:
        """Waits."""
        raise EnvironmentFailure("asleep")

    def get_context(self, messages):
        if self.how == "forgetfully":
            raise KeyError("what was it")

    def get_reward(self, completion) -> float:
        assert (len(completion) > 1) == (self.how != "idle")
        if self.how == "unpaid":
            raise ConnectionError("no bank")
        return {"idle": 0.0, "badly": 1.0, "well": 3.0}[self.how]


ROWS = [{"prompt": [{"role": "user", "content": "Work."}], "number": i} for i in range(2)]
WORK = {2: ["well"], 4: ["well", "forgetfully", "badly"], 5: ["unpaid"], 6: ["badly", "badly"]}


@pytest.mark.parametrize("trainer", [GRPO, pytest.param(RLOO, marks=pytest.mark.slow)])
def test_a_failed_trajectory_is_in_no_loss_and_no_baseline(trainer):
    seen, is_grpo, going = [], trainer is GRPO, [0, 2, 6, 7]

    def punctual(completions, **kwargs):
        seen.extend(completions)
        return [7.0 if i in going else 1000.0 for i in range(len(completions))]

    script = {1: [call("wait")], **{i: [call("work", how=how) for how in hows] for i, hows in WORK.items()}}
    options = {"loss_type": "dapo"} if is_grpo else {}
    options |= {"unanswered": {1: 0, 4: 1}, "reward": punctual, "beta": 0.0}
    result = play(partial(Office, count()), ROWS, script, trainer, **options)
    assert logged(result, "tools/environment_failures") == [4]
    assert logged(result, "reward") == [8.0] and logged(result, "rewards/punctual/mean") == [7.0]
    # Failures end a conversation; other errors of tools are results
    assert [len(each) for each in seen] == [1, 1, 3, 1, 3, 3, 5, 1] and "try again" in seen[6][1]["content"]
    first, second = (1.5 / (4.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)) if is_grpo else (3.0, 1.0)
    advantages = [-first, 0, first, 0, 0, 0, second, -second]
    inputs, model = result.trainer.inputs, talking("qwen3_vl")["model"]
    assert inputs["advantages"].tolist() == pytest.approx(advantages, abs=1e-5)
    logps = own_logps(model, inputs.rollout.prompts, inputs["completion_ids"], inputs["completion_mask"])
    sampled = (inputs["completion_mask"] * inputs["tool_mask"])[going]
    loss = -(torch.tensor(advantages)[going, None] * sampled * logps[going]).sum()
    (loss / (sampled.sum() if is_grpo else 8)).backward()
    truth = {name: -1e-2 * each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert relative_difference(truth, {name: result.update[name] for name in truth}) <= 1e-4


class Blurred(Office):
    """Shows what can't be read: the fourth at first, and others when their context is rewritten."""

    def reset(self, **row):
        self.how = "idle"
        return [BROKEN] if self.place == 3 else None

    def get_context(self, messages):
        return [{"role": "user", "content": [BROKEN]}] if self.how == "well" else None


BROKEN = {"type": "image", "image": b"no image"}


def test_media_of_an_environment_that_cannot_be_read_are_its_failure():
    script = {2: [call("work", how="well")], 5: [call("work", how="badly")]}
    result = play(partial(Blurred, count()), ROWS, script, GRPO, unanswered={2: 0})
    assert logged(result, "tools/environment_failures") == [2]


class Gallery:
    """Shows a picture."""

    def __init__(self, show):
        self.show = show

    def reset(self, **row):
        return self.show

    def get_reward(self, completion) -> float:
        return float(len(str(completion)))


PICTURE = PIL.Image.new("RGB", (28, 28), "red")


@pytest.mark.parametrize("shown", [{"screen": PICTURE}, ("a", [PICTURE]), b"RIFF", np.zeros((2, 28, 28, 3), np.uint8)])
def test_media_of_reset_inside_of_other_values_are_an_error(shown):
    with pytest.raises(RuntimeError, match=r"`Gallery.reset` returned a medium .*; return a list of content blocks"):
        play(partial(Gallery, shown), ROWS, {})


def test_a_text_becomes_the_message_of_the_user_before_an_environment():
    rows = [{**row, "prompt": "Work."} for row in ROWS]
    factory = partial(Gallery, [{"type": "image", "image": PICTURE}])
    results = [play(factory, prompts, {}) for prompts in (ROWS, rows)]
    inputs = [result.trainer.inputs for result in results]
    assert inputs[0].rollout.source.messages == inputs[1].rollout.source.messages
    assert all(results[0].update[name].equal(results[1].update[name]) for name in results[0].update)
    evaluated = [
        evaluate(**talking("qwen3_vl"), dataset=prompts, reward_funcs=None, environment_factory=factory).rows
        for prompts in (ROWS, rows)
    ]
    assert evaluated[0] == evaluated[1]


def test_a_run_ends_when_every_environment_fails(monkeypatch):
    script = dict.fromkeys(range(8), [call("work", how="hastily")])
    with pytest.raises(RuntimeError, match="All environments .*row 0: .*EnvironmentFailure: burnt down") as info:
        play(partial(Office, count(4)), ROWS, script, unanswered=dict.fromkeys(range(8), 0))
    assert isinstance(info.value.__cause__, EnvironmentFailure)
    monkeypatch.setattr(Office, "reset", lambda self: None)  # which takes no row
    with pytest.raises(TypeError, match=r"`Office.reset` can't be called with the columns \['prompt', 'number'\] "):
        play(partial(Office, count()), ROWS, {})


def test_evaluations_count_failed_trajectories_and_score_the_others():
    options = {"dataset": ROWS * 2, "reward_funcs": None, "environment_factory": partial(Office, count())}
    args = EvaluationConfig(max_completion_length=8, correct_threshold=0.0)
    result = evaluate(**talking("qwen3_vl"), **options, args=args)
    names = ("tools/environment_failures", "rows", "scored_rows", "accuracy")
    assert [result.metrics[name] for name in names] == [1, 4, 3, 1.0]
    assert [row["environment_failures"] for row in result.rows] == [[None]] * 3 + [["closed today"]]
