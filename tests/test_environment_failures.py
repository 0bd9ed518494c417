# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments that fail: their trajectories are in no loss and no baseline, and are counted."""

import functools

import pytest
import torch
from datasets import Dataset
from helpers.tools import GRPO, RLOO, Saying, call, talking
from helpers.trainer_utils import logged, relative_difference, run

from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rollout.environments import EnvironmentFailure


class Office:
    """The fourth is closed, and the others fail when they are asked to."""

    made = 0
    closed = (3,)

    def __init__(self):
        self.place = Office.made
        Office.made += 1

    def reset(self, **row):
        self.how = "idle"
        if self.place in self.closed:
            raise RuntimeError("closed today")

    def work(self, how: str) -> str:
        """
        Works.

        Args:
            how: How.

        Returns:
            What is done.
        """
        self.how = how
        if how == "gone":
            raise EnvironmentFailure("burnt down")
        if how == "badly":
            raise ValueError("try again")
        return "done"

    async def wait(self) -> str:
        """
        Waits.

        Returns:
            Nothing.
        """
        raise EnvironmentFailure("asleep")

    def get_context(self, messages):
        if self.how == "forgetful":
            raise KeyError("what was it")

    def get_reward(self) -> float:
        if self.how == "unpaid":
            raise ConnectionError("no bank")
        return {"idle": 0.0, "badly": 1.0, "well": 3.0}[self.how]


QUESTION = [{"role": "user", "content": "Work."}]
# Of each group, two go on: the first and third, and the third and fourth
SCRIPT = {
    1: [call("work", how="gone")],
    2: [call("work", how="well")],
    4: [call("work", how="well"), call("work", how="forgetful"), call("work", how="badly")],
    5: [call("work", how="unpaid")],
    6: [call("work", how="badly"), call("work", how="badly")],
}
ROWS = [{"prompt": QUESTION, "number": i} for i in range(2)]
OPTIONS = {"shuffle_dataset": False, "max_completion_length": 400, "max_steps": 1, "beta": 0.0}


def train(trainer, monkeypatch, script=SCRIPT, unanswered=None, **options):
    monkeypatch.setattr(Office, "made", 0)
    objects = {**talking("qwen3_vl"), "environment_factory": Office}
    sampler = functools.partial(Saying, script=script, unanswered=unanswered)
    return run(trainer, "qwen3_vl", Dataset.from_list(ROWS), objects=objects, sampler=sampler, **OPTIONS, **options)


@pytest.mark.parametrize("trainer", [GRPO, pytest.param(RLOO, marks=pytest.mark.slow)])
def test_a_failed_trajectory_is_in_no_loss_and_no_baseline(trainer, monkeypatch):
    seen = []

    def punctual(completions, **kwargs):
        seen.extend(completions)
        return [7.0 if i in (0, 2, 6, 7) else 1000.0 for i in range(len(completions))]

    waits, options = trainer is RLOO, {"loss_type": "dapo"} if trainer is GRPO else {}
    script = {**SCRIPT, **({5: [call("wait")]} if waits else {})}
    unanswered = {1: 0, 4: 1, **({5: 0} if waits else {})}
    result = train(trainer, monkeypatch, script, unanswered, reward=punctual, **options)
    assert logged(result, "tools/environment_failures") == [4]
    assert logged(result, "reward") == [8.0] and logged(result, "rewards/punctual/mean") == [7.0]
    assert logged(result, "tools/failure_frequency") == pytest.approx([2 / 7])
    # Failures end a conversation; errors of tools are results
    assert [len(each) for each in seen] == [1, 1, 3, 1, 3, 1 if waits else 3, 5, 1]
    assert "try again" in seen[6][1]["content"]

    scale = torch.tensor([4.5, 0.5]).sqrt() + 1e-4  # of 0 and 3, and of 1 and 0
    half = torch.tensor([1.5, 0.5]) / scale if trainer is GRPO else torch.tensor([3.0, 1.0])
    advantages = torch.tensor([-half[0], 0, half[0], 0, 0, 0, half[1], -half[1]])
    inputs = result.trainer.inputs
    assert inputs["advantages"].tolist() == pytest.approx(advantages.tolist(), abs=1e-5)
    model = talking("qwen3_vl")["model"]
    loss, n_tokens = 0.0, 0
    for i in (0, 2, 6, 7):
        n = int((inputs["completion_ids"][i] != inputs.rollout.pad_token_id).nonzero().max()) + 1
        completion, sampled = inputs["completion_ids"][i][:n], inputs["tool_mask"][i][:n]
        ids = torch.cat([inputs.rollout.prompts[i].input_ids, completion])
        logps = model(input_ids=ids[None]).logits[0, -n - 1 : -1].log_softmax(-1).gather(-1, completion[:, None])
        loss, n_tokens = loss - advantages[i] * (logps[:, 0] @ sampled.float()), n_tokens + int(sampled.sum())
    (loss / (n_tokens if trainer is GRPO else 8)).backward()
    truth = {name: -1e-2 * each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert relative_difference(truth, {name: result.update[name] for name in truth}) <= 1e-4


def test_a_run_ends_when_every_environment_fails(monkeypatch):
    with pytest.raises(
        RuntimeError, match="All environments of a batch failed.*row 0: .*EnvironmentFailure: burnt"
    ) as info:
        train(
            GRPO,
            monkeypatch,
            {i: [call("work", how="gone")] for i in range(8)},
            dict.fromkeys(range(8), 0),
            reward=None,
        )
    assert isinstance(info.value.__cause__, EnvironmentFailure)
    monkeypatch.setattr(Office, "reset", lambda self: None)  # which takes no row
    with pytest.raises(RuntimeError, match="TypeError: .*unexpected keyword argument"):
        train(GRPO, monkeypatch, {}, reward=None)


def test_evaluations_count_failed_trajectories_and_score_the_others(monkeypatch):
    monkeypatch.setattr(Office, "made", 0)
    rows, config = [{"prompt": QUESTION}] * 4, EvaluationConfig(max_completion_length=8, correct_threshold=0.0)
    result = evaluate(**talking("qwen3_vl"), dataset=rows, reward_funcs=None, args=config, environment_factory=Office)
    metrics = result.metrics
    assert (metrics["tools/environment_failures"], metrics["rows"], metrics["scored_rows"]) == (1, 4, 3)
    assert [row["environment_failures"] for row in result.rows] == [[None]] * 3 + [["closed today"]]
    assert [row["correct"] for row in result.rows] == [[True]] * 3 + [[None]] and metrics["accuracy"] == 1.0
