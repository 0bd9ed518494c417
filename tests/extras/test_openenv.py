# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments on servers of the package OpenEnv, over loopback."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import PIL.Image
import pytest
import requests
from helpers.folders import TESTS
from helpers.openenv_server import COLORS, png
from helpers.processes import free_port
from helpers.tools import Saying, call, check_rewards, play
from helpers.trainer_utils import logged, norm
from transformers.utils import get_json_schema

from trl_multimodal_rft.encoding.conversations import Conversation
from trl_multimodal_rft.extras.openenv import openenv
from trl_multimodal_rft.rollout.environments import EnvironmentFailure


pytest.importorskip("openenv")

QUESTION = [{"role": "user", "content": "Switch the lamp."}]
MEDIA = {"screenshot": "image", "thumbnail": "image"}


@contextmanager
def serving(name: str):
    """Yields the address and the process of a server."""
    port = str(free_port())
    command = [sys.executable, "-m", "uvicorn", f"helpers.openenv_server:{name}", "--factory", "--port", port]
    url = f"http://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=TESTS, **quiet) as server:
        try:
            while server.poll() is None:
                try:
                    yield requests.get(f"{url}/health", timeout=60).url.removesuffix("/health"), server
                    return
                except requests.ConnectionError:
                    time.sleep(0.2)
            pytest.fail("The server has ended.")
        finally:
            server.kill()


@pytest.fixture(scope="module")
def lamp():
    with serving("lamp") as (url, _):
        yield url


def pixels(medium) -> list[int]:
    """The one color of an image."""
    found = PIL.Image.open(BytesIO(medium)) if isinstance(medium, bytes) else medium
    [color] = np.unique(np.asarray(found).reshape(-1, 3), axis=0).tolist()
    return color


def test_the_tool_has_the_schema_of_the_server_and_its_errors_are_results(lamp):
    environment = openenv(lamp)()
    theirs = requests.get(f"{lamp}/schema", timeout=60).json()["action"]
    found = get_json_schema(environment.step)["function"]
    kept = ("type", "description", "enum")
    properties = {
        key: {name: each[name] for name in kept if name in each} for key, each in theirs["properties"].items()
    }
    del properties["metadata"]
    parameters = {"type": "object", "properties": properties, "required": theirs["required"]}
    assert found == {"name": "step", "description": theirs["description"], "parameters": parameters}
    environment.reset(wanted="green", image=object(), prompt=QUESTION)
    for arguments, message in (
        ({"color": "blue"}, "color: Input should be 'red' or 'green'"),
        ({"color": "red", "size": 1}, "size: Extra inputs are not permitted"),
        ({"color": "red", "times": 6}, "too often"),
    ):
        with pytest.raises(ValueError, match=message):
            environment.step(**arguments)
    texts = [environment.step(color=color) for color in ("red", "green", "green")]
    assert environment.get_reward() == sum(environment.rewards) == 2.25
    assert [text.endswith("\nThe episode has ended.") for text in texts] == [False, False, True]
    with pytest.raises(ValueError, match="has ended"):
        environment.step(color="red")


def test_media_are_blocks_and_files_that_a_server_names_stay_closed(lamp):
    environment = openenv(lamp, media=MEDIA)()
    blind = openenv(lamp)()
    frame, text = environment.reset()
    assert pixels(frame["image"]) == COLORS["red"] and text == {"type": "text", "text": "Make it red."}
    screenshot, thumbnail, text = environment.step(color="green")
    assert pixels(screenshot["image"]) == pixels(thumbnail["image"]) == COLORS["green"]
    assert text == {"type": "text", "text": "Clicked."}
    with pytest.raises(ValueError, match="base64|padding"):
        environment.reset(screenshot=__file__)
    assert isinstance(blind.reset(), list) and png("red") in blind.step(color="red")


def test_only_unset_fields_and_media_are_left_out_of_a_text(lamp):
    environment = openenv(lamp)()
    block = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    for shown in (0, False, [], [1, None, [], {"type": 3, "found": 0}], {"open": False, "doors": []}):
        assert json.loads(environment.reset(shown=shown)) == {"shown": shown}
    assert environment.reset(shown={"type": "wall", "unset": None}) == "wall"
    blocks = [{"type": "image", "image": b"x"}, {"type": "text", "text": '{"shown": [{"type": 3}, null]}'}]
    assert environment.reset(shown=[block, {"type": 3}, None]) == blocks
    assert environment.reset(shown=[block, {"of": [block]}]) == blocks[:1] * 2


def test_a_policy_acts_on_what_it_sees_and_is_rewarded(lamp):
    turns = {0: ["red"], 1: ["green", "red"], 2: ["blue"], 5: ["green"], 6: ["red", "red"]}
    script = {i: [call("step", color=color) for color in colors] for i, colors in turns.items()}
    rows = [{"prompt": QUESTION, "wanted": wanted} for wanted in ("red", "green")]
    result = play(openenv(lamp, media=MEDIA), rows, script, self_check=True)
    check_rewards(result, "Lamp", [[1.0, 1.25, 0, 0], [0, 1.0, 0.5, 0]])
    assert logged(result, "tools/failure_frequency") == pytest.approx([1 / 7])
    prompts = result.trainer.inputs.rollout.prompts
    assert all(prompt.modalities == {"image"} for prompt in prompts)
    assert [isinstance(prompt, Conversation) for prompt in prompts] == [i in (0, 1, 5, 6) for i in range(8)]
    assert result.trainer.checks.self_check.conversation <= 1e-4 and norm(result.update) > 1e-3


class Killing(Saying):
    """Ends a server between the first turns and their calls."""

    def __call__(self, model, prompts, *, room=None, **options):
        if room is None:
            self.server.kill()
            self.server.wait()
        return super().__call__(model, prompts, room=room, **options)


def test_a_killed_server_fails_its_trajectories_alone(lamp, monkeypatch):
    with serving("lamp") as (url, server):
        monkeypatch.setattr(Killing, "server", server, raising=False)
        factories = {"here": openenv(lamp), "there": openenv(url)}
        rows = [{"prompt": QUESTION, "environment": each} for each in ("there", "here")]
        script = {i: [call("step", color="green" if i == 6 else "red")] for i in (1, 2, 5, 6)}
        result = play(factories, rows, script, sampler=Killing, unanswered={1: 0, 2: 0}, self_check=True)
        assert logged(result, "tools/environment_failures") == [2]
        advantages = result.trainer.inputs["advantages"]
        assert advantages[:4].tolist() == [0] * 4 and advantages[5] > advantages[6] > advantages[4]
        assert result.trainer.inputs["completion_mask"].any(1).tolist() == [i not in (1, 2) for i in range(8)]
        with pytest.raises(EnvironmentFailure, match="ConnectionRefusedError"):
            factories["there"]().reset()


def test_tools_of_mcp_are_tools():
    with serving("album") as (url, _):
        environment, other, third = (openenv(url)() for _ in range(3))
        assert environment.reset() == "Colors"
        schema = get_json_schema(environment.show)["function"]
        assert schema["description"] == "Shows a picture." and schema["parameters"]["required"] == ["color"]
        text, block = environment.show(color="green", note="Here:")
        assert text == {"type": "text", "text": "Here:"} and pixels(block["image"]) == COLORS["green"]
        assert environment.wipe() == "[]"
        with pytest.raises(ValueError, match="blue"):
            environment.show(color="blue")
        other.reset()
        with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED"):
            third.reset()
