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
    result = play(lamps, lamps.rows[:2], script)
    # Twice whether the lamp is as wanted, an eighth of the turns, and a sixteenth for what the second call shows
    rewards = [[2 + 2 / 8, 2 + 3 / 8 + 1 / 16, 2 / 8, 1 / 8], [2 + 2 / 8, 2 + 3 / 8, 1 / 8, 1 / 8]]
    check_rewards(result, "lamps", rewards)
    assert logged(result, "tools/failure_frequency") == pytest.approx([1 / 7])
    assert all(prompt.modalities == {"image"} for prompt in result.trainer.inputs.rollout.prompts)
    broken = lamps()
    broken.reset(**lamps.rows[2])
    with pytest.raises(EnvironmentFailure, match="no blue lamps"):
        broken.lamp_switch(color="red")
    with pytest.raises(ValueError, match="'lamps' never end, or need a user"):
        verifiers_environment("lamps", task={"stops": {"late": {"fn": "os.getcwd"}}})


def test_rollouts_share_a_server_that_lives_as_long_as_their_class():
    this, completion = psutil.Process(), [{"role": "assistant", "content": "Done"}]
    before = {*this.children()}
    lamps = verifiers_environment("lamps", task={"is_shared": True})
    first, second, third = (lamps() for _ in range(3))
    first.reset(task=0)
    second.reset(task=1)
    calls = ((first, "red"), (second, "green"), (first, "green"))
    # The server counts all calls; colors, and so rewards, are a rollout's own
    shown = [rollout.lamp_switch(color=color)[0]["text"] for rollout, color in calls]
    assert shown == ["any after 1 of 1", "any after 1 of 2", "any after 2 of 3"]
    assert [asyncio.run(each.get_reward(completion)) for each in (first, second)] == [2 + 1 / 8, 1 / 8]
    third.reset(task=1)
    assert third.lamp_switch(color="red")[0]["text"] == "any after 1 of 4"
    assert asyncio.run(third.get_reward(completion)) == 2 + 1 / 8
    [server] = {*this.children()} - before
    del calls, first, second, third, lamps
    gc.collect()
    server.wait(60)
