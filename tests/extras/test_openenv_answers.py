# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Servers of OpenEnv whose tools and fields have names of Python or of environments, or whose answers are wrong."""

import json
import math
import threading

import pytest

from trl_multimodal_rft.extras.openenv import openenv
from trl_multimodal_rft.rollout.environments import EnvironmentFailure, tools_of


server_of = pytest.importorskip("websockets.sync.server")
datastructures = pytest.importorskip("websockets.datastructures")
http11 = pytest.importorskip("websockets.http11")

MCP = {"properties": {"type": {"const": "call_tool"}}}
SCREEN = {"screenshot": "image"}


def answer(observation, reward=1.0, **more):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": False, **more}}


@pytest.fixture(scope="module")
def serve():
    """Returns a function that makes a class of environments from an action and answers by request."""
    books = []

    def page(connection, request):
        key, _, what = request.path.strip("/").partition("/")
        if what == "ws":
            return None
        found = {"name": "Lamp", "description": "d"} if what == "metadata" else {"action": books[int(key)]["action"]}
        body = json.dumps(found).encode()
        headers = datastructures.Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        return http11.Response(200, "OK", headers, body)

    def talk(socket):
        book = books[int(socket.request.path.strip("/").partition("/")[0])]
        for message in socket:
            asked = json.loads(message)
            kind = "list" if asked["data"].get("type") == "list_tools" else asked["type"]
            book["asked"].append(asked["data"])
            for each in book.get(kind, [answer({"message": "hi"})]):
                socket.send(each if isinstance(each, str) else json.dumps(each))

    with server_of.serve(talk, "127.0.0.1", 0, process_request=page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def make(action, media=None, **answers):
            books.append({"action": action, "asked": [], **answers})
            url = f"http://127.0.0.1:{server.socket.getsockname()[1]}/{len(books) - 1}"
            return openenv(url, media=media), books[-1]

        yield make
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "get_context",
        "get_reward",
        "reset",
        "url",
        "media",
        "rewards",
        "_call_tool",
        "_shown",
        "__init__",
        "a-b",
        "class",
        "2nd",
        "",
    ],
)
def test_names_of_tools(serve, name):
    """All tools are the policy's, and the environment's own methods stay."""
    listed = [{"name": each, "description": "d", "input_schema": {"properties": {}}} for each in (name, "show")]
    made, book = serve(MCP, list=[answer({"tools": listed})])
    environment = made()
    assert environment.reset() == "hi" and environment.get_reward() == 0
    tools = tools_of(environment)
    assert len(tools) == 2 and all(each.isidentifier() for each in tools)
    for tool in tools.values():
        tool()
    assert {each.get("tool_name") for each in book["asked"][-2:]} == {name, "show"}
    assert environment.get_reward() == 2


@pytest.mark.parametrize("field", ["my-field", "class", "self", "2nd", "a b", "lambda"])
def test_names_of_fields(serve, field):
    made, book = serve(
        {"description": "Acts.", "properties": {field: {"type": "string"}, "color": {"type": "string"}}}
    )
    environment = made()
    environment.reset()
    (name,) = environment.step.__annotations__.keys() - {"color"}
    environment.step(**{name: "x", "color": "red"})
    assert book["asked"][-1] == {field: "x", "color": "red"}


PIXELS = [[[200, 100, 50]] * 2] * 2
WRONG = {
    "a reward of NaN": [answer({"message": "x"}, math.nan)],
    "an infinite reward": [answer({"message": "x"}, math.inf)],
    "a reward in words": [answer({"message": "x"}, "high")],
    "a reward that is a truth value": [answer({"message": "x"}, True)],
    "a reward that float32 can't hold": [answer({"message": "x"}, 1e39)],
    "two answers": [answer({"message": "mine"}), answer({"message": "stale"}, 100.0)],
    "no observation": [{"type": "observation", "data": {"reward": 1.0, "done": False}}],
    "no data": [{"type": "observation"}],
    "a list": ["[1]"],
    "no JSON": ["Bad gateway"],
    "another type": [{"type": "state", "data": {}}],
    "pixels from 0 to 1": [answer({"screenshot": [[[0.8, 0.5, 0.2]] * 2] * 2})],
    "pixels above 255": [answer({"screenshot": [[[300, 5, 2]] * 2] * 2})],
    "no pixels": [answer({"screenshot": []})],
    "rows of several lengths": [answer({"screenshot": [[1, 2], [3]]})],
    "five channels": [answer({"screenshot": [[[1] * 5]]})],
    "texts as pixels": [answer({"screenshot": [["a"]]})],
}


@pytest.mark.parametrize("name", WRONG)
def test_answers_fail_the_trajectory(serve, name):
    made, _ = serve({"description": "Acts.", "properties": {"color": {"type": "string"}}}, SCREEN, step=WRONG[name])
    environment = made()
    environment.reset()
    with pytest.raises(EnvironmentFailure):
        environment.step(color="red")
        environment.step(color="blue")
    assert math.isfinite(environment.get_reward()) and environment.get_reward() <= 2


def test_right_answers(serve):
    made, _ = serve({"description": "Acts.", "properties": {}}, SCREEN, step=[answer({"screenshot": PIXELS}, None)])
    environment = made()
    environment.reset()
    [block] = environment.step()
    assert block["image"].tolist() == PIXELS and environment.get_reward() == 0
