# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments of the package verifiers, with servers of their own."""

import functools
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from helpers.tools import GRPO, Saying, call, talking
from helpers.trainer_utils import logged, run
from transformers.utils import get_json_schema

from trl_multimodal_rft.rollout.environments import EnvironmentFailure
from trl_multimodal_rft.rollout.verifiers import verifiers_environment


pytest.importorskip("verifiers.v1")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Servers import their taskset, too."""
    tests = Path(__file__).parent
    monkeypatch.syspath_prepend(tests / "helpers")
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests / 'helpers'}")


def test_a_policy_plays_tasks_and_has_their_rewards_and_others_are_refused():
    lamps = verifiers_environment("lamps")
    schema = get_json_schema(lamps().lamp_switch)["function"]
    assert schema["description"] == "Switches the lamp." and schema["parameters"]["required"] == ["color"]
    turns = {0: ["green"], 1: ["red", "green"], 2: ["pink"], 4: ["red"], 5: ["green", "red"]}
    script = {i: [call("lamp_switch", color=color) for color in colors] for i, colors in turns.items()}
    objects = {**talking("qwen3_vl"), "environment_factory": lamps}
    options = {"shuffle_dataset": False, "max_completion_length": 1200, "max_steps": 1, "reward": None}
    sampler = functools.partial(Saying, script=script)
    result = run(GRPO, "qwen3_vl", Dataset.from_list(lamps.rows[:2]), objects=objects, sampler=sampler, **options)
    # Twice whether the lamp is as wanted, an eighth of the turns, and a sixteenth for what the second call shows
    rewards = np.array([[2 + 2 / 8, 2 + 3 / 8 + 1 / 16, 2 / 8, 1 / 8], [2 + 2 / 8, 2 + 3 / 8, 1 / 8, 1 / 8]])
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    assert result.trainer.inputs["advantages"].tolist() == pytest.approx(advantages.flatten().tolist(), abs=1e-4)
    assert logged(result, "rewards/lamps/mean") == [rewards.mean()]
    assert logged(result, "tools/failure_frequency") == pytest.approx([1 / 7])
    assert all(prompt.modalities == {"image"} for prompt in result.trainer.inputs.rollout.prompts)
    broken = lamps()
    broken.reset(**lamps.rows[2])
    with pytest.raises(EnvironmentFailure, match="no blue lamps"):
        broken.lamp_switch(color="red")
    with pytest.raises(ValueError, match="'lamps' never end, or need a user"):
        verifiers_environment("lamps", task={"stops": {"late": {"fn": "os.getcwd"}}})
