# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments of the package verifiers, with servers of their own."""

import asyncio
import gc
from pathlib import Path

import psutil
import pytest
from helpers.tools import call, check_rewards, play
from helpers.trainer_utils import logged
from transformers.utils import get_json_schema

from trl_multimodal_rft.extras import verifiers
from trl_multimodal_rft.extras.verifiers import verifiers_environment
from trl_multimodal_rft.rollout.environments import EnvironmentFailure


pytest.importorskip("verifiers.v1")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Servers import their taskset, too."""
    tests = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(tests / "helpers")
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests / 'helpers'}")


def test_a_policy_plays_tasks_and_has_their_rewards_and_others_are_refused(monkeypatch):
    lamps = verifiers_environment("lamps")
    schema = get_json_schema(lamps().lamp_switch)["function"]
    assert schema["description"] == "Switches the lamp." and schema["parameters"]["required"] == ["color"]
    lamp = {0: ["green"], 1: ["red", "green"], 2: ["pink"], 4: ["red"], 5: ["green", "red"]}
    turns = {"lamp_switch": lamp, "sun_switch": {3: ["green"], 7: ["green", "red"]}}
    script = {i: [call(name, color=each) for each in colors] for name in turns for i, colors in turns[name].items()}
    result = play(lamps, lamps.rows[:2], script)
    # Twice whether a lamp is as wanted, an eighth of the turns, and a sixteenth for what the second call shows
    rewards = [[2 + 2 / 8, 2 + 3 / 8 + 1 / 16, 2 / 8, 2 + 2 / 8], [2 + 2 / 8, 2 + 3 / 8, 1 / 8, 2 + 3 / 8 + 1 / 16]]
    check_rewards(result, "lamps", rewards)
    assert logged(result, "tools/failure_frequency") == pytest.approx([1 / 10])
    assert all(prompt.modalities == {"image"} for prompt in result.trainer.inputs.rollout.prompts)
    broken, later = lamps(), lamps()
    later.reset(**lamps.rows[0])  # when other rollouts have ended, and the server of all tasks has not
    assert later.sun_switch(color="green")[0]["text"] == "any after 1 of 4"
    with monkeypatch.context() as patch, pytest.raises(EnvironmentFailure, match="^switch: TimeoutError"):
        patch.setattr(verifiers, "TIMEOUT", 0)
        later.sun_switch(color="red")
    assert asyncio.run(later.get_reward([])) == 2
    broken.reset(**lamps.rows[2])
    with pytest.raises(EnvironmentFailure, match="no blue lamps"):
        broken.lamp_switch(color="red")
    with pytest.raises(ValueError, match="'lamps' is endless or empty, or its tasks need a user"):
        verifiers_environment("lamps", task={"stops": {"late": {"fn": "os.getcwd"}}})


def test_servers_of_all_tasks_end_with_the_class():
    this = psutil.Process()
    before = {*this.children()}
    lamps = verifiers_environment("lamps")
    [server] = {*this.children()} - before
    del lamps
    gc.collect()
    server.wait(60)
