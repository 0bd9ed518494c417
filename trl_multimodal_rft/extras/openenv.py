# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments on servers of [OpenEnv](https://huggingface.co/docs/openenv), by its WebSocket protocol."""

import base64
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from inspect import Parameter, Signature
from keyword import iskeyword
from typing import Any

import numpy as np
import requests

from ..credentials import without_credentials
from ..data.reading.decoding import require_module
from ..data.reading.refs import shortened
from ..rollout.environments import EnvironmentFailure


Json = dict[str, Any]  # an object
Value = str | float | list | Json | None
Observation = str | list[Json]

_MOST_BYTES = 100 * 2**20  # of an observation, as OpenEnv's own client takes
TIMEOUT = 60  # seconds of a call of a server
_TO_ARRIVE = 0.01  # seconds for the rest of an answer that is split in two
_ERRORS_OF_ACTIONS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # after which a session goes on
_NOT_FOR_TOOLS = {"url", "media", "rewards", "get_context", "get_reward", "reset"}
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_DATA_URI = re.compile(r"data:(image|audio|video)/[^,]*;base64,")


class Session:
    """A session of a server, which has an environment of its own for it."""

    def __init__(self, url: str):
        self.url, self._opened = url, ExitStack()
        self._socket: Any = None

    def ask(self, kind: str, data: Json, opens: bool = False) -> Json:
        """The server's answer. Unless it `opens` one, the session is that of the last answer, which knows of it."""
        client = require_module("websockets.sync.client", "environments")
        errors = require_module("websockets.exceptions", "environments")
        try:
            if self._socket is None:
                if not opens:
                    raise ConnectionError("the session is over")
                socket = client.connect(f"ws{self.url.removeprefix('http')}/ws", max_size=_MOST_BYTES)
                self._socket = self._opened.enter_context(socket)
            waiting = self._waiting_answer(errors.ConnectionClosed)
            with suppress(errors.ConnectionClosed):  # after the reason, which can still be read
                self._socket.send(json.dumps({"type": kind, "data": data}, default=lambda medium: None))
            answer = json.loads(waiting or self._socket.recv(timeout=TIMEOUT))
            data = answer["data"]
            if not isinstance(data, dict) or answer["type"] not in ("observation", "error"):
                raise TypeError(f"it answered {shortened(answer)}")
        except (OSError, errors.WebSocketException, ValueError, KeyError, TypeError) as error:
            self.close()
            raise EnvironmentFailure(without_credentials(f"{self.url}: {type(error).__name__}: {error}")) from error
        if answer["type"] == "error" and data["code"] in _ERRORS_OF_ACTIONS:
            details = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", ())]
            raise ValueError("; ".join([data["message"], *details]))
        if answer["type"] == "error":
            self.close()
            raise EnvironmentFailure(without_credentials(f"{self.url}: {data['code']}: {data['message']}"))
        return data

    def _waiting_answer(self, closed: type[Exception]) -> str | bytes | None:
        """An error that the server sent before the next request. After another answer, all would be off by one."""
        with suppress(TimeoutError, closed):
            answer = self._socket.recv(timeout=_TO_ARRIVE)
            if json.loads(answer)["type"] != "error":
                raise ConnectionError("it answered one request twice")
            return answer
        return None

    def close(self) -> None:
        self._socket = None
        self._opened.close()

    __del__ = close  # which lets the server open others


class ServedEnvironment:
    """An environment with the tools of a server."""

    _act: Callable[..., Observation]  # gets a tool's name there and its arguments


class OpenEnvironment(ServedEnvironment):
    """An environment in a session. Subclasses have its tools."""

    url: str
    media: Mapping[str, str]

    def __init__(self):
        self._session, self._is_done = Session(self.url), False
        self.rewards: list[float] = []  # of the episode's steps

    def reset(self, **row: Value) -> Observation:
        """Starts an episode with what JSON holds of a row; the server takes the columns that it knows."""
        self.rewards = []
        with suppress(EnvironmentFailure):  # of a session that the server has closed since
            return self._shown(self._session.ask("reset", row, opens=True))
        return self._shown(self._session.ask("reset", row, opens=True))

    def get_reward(self) -> float:
        """The sum of the rewards of the episode's steps."""
        return sum(self.rewards)

    def _act(self, tool: str | None, arguments: Json) -> Observation:
        if self._is_done:
            raise ValueError("The episode has ended; answer without a call.")
        call = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        answer = self._session.ask("step", arguments if tool is None else call)
        reward = answer.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float | None) or not math.isfinite(reward or 0.0):
            raise EnvironmentFailure(f"the server gave the reward {reward!r}, which is no finite number")
        self.rewards.append(float(reward or 0.0))
        return self._shown(answer)

    def _shown(self, answer: Json) -> Observation:
        try:
            seen, self._is_done = answer["observation"], bool(answer["done"])
        except (KeyError, TypeError):
            raise EnvironmentFailure("the server's answer has no `observation` and `done`") from None
        if "tool_name" in seen:  # of MCP
            if seen.get("error"):
                raise ValueError(seen["error"]["message"])
            seen = seen["result"]
            if isinstance(seen, dict) and "content" in seen:
                seen = seen["content"] or seen.get("data")  # an empty list has no blocks
        return observation_of(seen, self.media, "The episode has ended." if self._is_done else "")


def openenv(url: str, *, media: Mapping[str, str] | None = None) -> type[OpenEnvironment]:
    """
    Class of the environments that a server of [OpenEnv](https://huggingface.co/docs/openenv) runs, for
    `environment_factory`. Each has a session; a lost one fails its trajectory.

    Its tool `step` takes the fields of an action; a server of MCP tools gives these tools. Media in observations that
    are `data:` URIs or content blocks are shown as such, the rest as text.

    Args:
        url (`str`):
            Address of the server, such as `"http://localhost:8000"`.
        media (`dict[str, str]`, *optional*):
            Modality of fields that hold a medium in base64, or an image as lists of pixels: `{"screenshot": "image"}`.

    Raises:
        `ImportError`: Without the extra `environments`.
    """
    require_module("websockets", "environments")
    url, found = url.rstrip("/"), {}
    for what in ("metadata", "schema"):
        try:
            answer = requests.get(f"{url}/{what}", timeout=TIMEOUT)
            answer.raise_for_status()
            found |= answer.json()
        except (requests.RequestException, ValueError, TypeError) as error:
            raise ValueError(without_credentials(f"{url}/{what} isn't one of OpenEnv: {error}")) from None
    action, tools = found["action"], {}
    if action["properties"].get("type", {}).get("const") != "call_tool":
        tools["step"] = tool_of("step", action.get("description", "Acts."), action, None)
    else:
        with closing(Session(url)) as session:
            listed = session.ask("step", {"type": "list_tools"}, opens=True)["observation"]["tools"]
        for remote in listed:
            name = tool_name(remote["name"], tools)
            tools[name] = tool_of(name, remote["description"], remote["input_schema"], remote["name"])
    parts: Json = {"url": url, "media": media or {}, "__doc__": found["description"], **tools}
    return type(re.sub(r"\W", "_", found["name"]), (OpenEnvironment,), parts)


def tool_name(remote: str, tools: Collection[str]) -> str:
    """A name for a server's tool that Python allows and that no method of environments and no other tool has."""
    name = re.sub(r"\W", "_", remote).lstrip("_")
    if not name.isidentifier() or iskeyword(name) or hasattr(OpenEnvironment, name) or name in _NOT_FOR_TOOLS:
        name = f"tool_{name}"
    while name in tools:
        name += "_"
    return name


def tool_of(name: str, text: str, schema: Json, remote: str | tuple[str, str] | None) -> Callable:
    """A method with the parameters of a JSON schema, as TRL reads those of tools; `_act` gets its `remote` name."""

    def tool(self: ServedEnvironment, **arguments: Value) -> Observation:
        return self._act(remote, {fields.get(key, key): value for key, value in arguments.items()})

    lines, parameters, fields = [" ".join(text.split()), "", "Args:"], [], {}
    for field, each in schema.get("properties", {}).items():
        if field == "metadata":  # of every action, and nothing for a model
            continue
        key = re.sub(r"\W", "_", field)  # as a parameter of Python
        key = key if key.isidentifier() and not iskeyword(key) and key != "self" else f"field_{key}"
        while key in fields:
            key += "_"
        fields[key] = field
        spec = {**each, **next((option for option in each.get("anyOf", ()) if option.get("type") != "null"), {})}
        spec |= schema.get("$defs", {}).get(spec.get("$ref", "").rpartition("/")[2], {})
        choices = f" (choices: {json.dumps(spec['enum'])})" if "enum" in spec else ""
        lines.append(f"    {key}: {' '.join(each.get('description', key).split())}{choices}")
        default = Parameter.empty if field in schema.get("required", ()) else spec.get("default")
        annotation = _TYPES.get(spec.get("type"), str)
        parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    tool.__name__, tool.__doc__ = name, "\n".join(lines)
    tool.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(tool)["__signature__"] = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *parameters])
    return tool


def observation_of(value: Value, media: Mapping[str, str], last: str = "") -> Observation:
    """Content blocks of a value and the rest as text; only text, if there are no media."""
    blocks: list[Json] = []
    rest = [each for each in _take_blocks(value, blocks, media) if each not in (None, {})]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in rest]
    blocks += [{"type": "text", "text": each} for each in (*texts, last) if each]
    return blocks if any(block["type"] != "text" for block in blocks) else "\n".join(block["text"] for block in blocks)


def _pixels(value: Value) -> np.ndarray:
    """An image of lists of pixels, from 0 to 255."""
    with suppress(ValueError, TypeError, OverflowError):  # of lists of several lengths, and of texts
        pixels = np.asarray(value)
        has_shape = pixels.ndim in (2, 3) and pixels.size and (pixels.ndim == 2 or pixels.shape[2] in (1, 3, 4))
        if has_shape and np.array_equal(pixels, pixels.astype(np.uint8)):
            return pixels.astype(np.uint8)
    raise EnvironmentFailure(
        "the server shows an image that isn't rows of pixels, whole numbers from 0 to 255 such as [[[255, 0, 0]]]"
    )


def _take_blocks(value: Any, blocks: list[Json], media: Mapping[str, str], kind: str | None = None) -> list[Any]:
    """
    A value without its content blocks, which are appended, in a list that is empty if nothing is left. None is a file
    or URL, which a server might name.
    """
    n, name = len(blocks), value.get("type") if isinstance(value, dict) else None
    if name == "text" and isinstance(value.get("text"), str):
        blocks.append({"type": "text", "text": value["text"]})
        return []
    if name in ("image", "audio") and isinstance(value.get("data"), str):
        kind, value = name, value["data"]
    uri = _DATA_URI.match(value) if isinstance(value, str) else None
    if (kind := uri.group(1) if uri else kind) is not None and value is not None:
        is_text = isinstance(value, str)
        medium = base64.b64decode(value.rpartition(",")[2], validate=True) if is_text else _pixels(value)
        blocks.append({"type": kind, kind: medium})
        return []
    if isinstance(value, list):
        left = [rest for each in value for rest in _take_blocks(each, blocks, media)]
        return [left] if left or len(blocks) == n else []
    if not isinstance(value, dict):
        return [value]
    fields = {key: rest for key, each in value.items() for rest in _take_blocks(each, blocks, media, media.get(key))}
    fields = {key: each for key, each in fields.items() if each not in (None, {})}
    if len(blocks) > n and fields.keys() <= {"type"}:  # of a block whose medium was taken, such as `image_url`
        return []
    return [next(iter(fields.values()))] if [*map(type, fields.values())] == [str] else [fields]
