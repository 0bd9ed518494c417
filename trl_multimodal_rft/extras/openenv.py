# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments on servers of [OpenEnv](https://huggingface.co/docs/openenv), over its WebSocket protocol."""

import base64
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from inspect import Parameter, Signature
from itertools import chain
from keyword import iskeyword
from typing import Any

import numpy as np
import requests

from ..credentials import without_credentials
from ..data.reading.decoding import require_module
from ..data.reading.http import numbers_in
from ..data.reading.refs import shortened
from ..rewards.calls import LARGEST_REWARD
from ..rollout.environments import EnvironmentFailure


Json = dict[str, Any]
Value = str | float | list | Json | None
Observation = str | list[Json]

_MAX_BYTES = 100 * 2**20  # limit of an observation, as in OpenEnv's client
TIMEOUT = 60  # seconds until a call to a server fails
_PENDING_SECONDS = 0.01  # wait for a pending response, of which only a part may have arrived
_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # errors after which a session goes on
_RESERVED_NAMES = {"url", "media", "rewards", "get_context", "get_reward", "reset"}
# Python types of arguments, by type in a JSON schema
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_DATA_URI = re.compile(r"data:(image|audio|video)/[^,]*;base64,")


class Session:
    """Session on a server, which runs one environment per session."""

    def __init__(self, url: str):
        self.url = url
        self._exit_stack = ExitStack()
        self._socket: Any = None

    def ask(self, request_type: str, data: Json, opens: bool = False) -> Json:
        """
        Sends a request and returns the data of the server's response. With `opens`, starts a session if none is open.
        Raises `ValueError` for a failed action, after which the session goes on, and `EnvironmentFailure` if the
        session fails or isn't open.
        """
        client = require_module("websockets.sync.client", "environments")
        errors = require_module("websockets.exceptions", "environments")
        try:
            if self._socket is None:
                if not opens:
                    raise ConnectionError("the session is over")
                socket = client.connect(f"ws{self.url.removeprefix('http')}/ws", max_size=_MAX_BYTES)
                self._socket = self._exit_stack.enter_context(socket)
            pending_error = self._pending_error(errors.ConnectionClosed)
            with suppress(errors.ConnectionClosed):  # the server's reason for closing can still be read
                self._socket.send(json.dumps({"type": request_type, "data": data}, default=lambda medium: None))
            response = json.loads(pending_error or self._socket.recv(timeout=TIMEOUT))
            data = response["data"]
            if not isinstance(data, dict) or response["type"] not in ("observation", "error"):
                raise TypeError(f"it answered {shortened(response)}")
        except (OSError, errors.WebSocketException, ValueError, KeyError, TypeError) as error:
            self.close()
            raise EnvironmentFailure(without_credentials(f"{self.url}: {type(error).__name__}: {error}")) from error
        if response["type"] == "error" and data["code"] in _ACTION_ERRORS:
            details = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in data.get("errors", ())]
            raise ValueError("; ".join([data["message"], *details]))
        if response["type"] == "error":
            self.close()
            raise EnvironmentFailure(without_credentials(f"{self.url}: {data['code']}: {data['message']}"))
        return data

    def _pending_error(self, closed_error: type[Exception]) -> str | bytes | None:
        """
        Returns an error that the server sent after its last response, or `None`. Raises `ConnectionError` for any
        other response, because later requests would then get the responses to earlier ones.
        """
        with suppress(TimeoutError, closed_error):
            response = self._socket.recv(timeout=_PENDING_SECONDS)
            if json.loads(response)["type"] != "error":
                raise ConnectionError("it answered one request twice")
            return response
        return None

    def close(self) -> None:
        self._socket = None
        self._exit_stack.close()

    __del__ = close  # servers may limit the number of sessions


class ServedEnvironment:
    """Base class of environments whose tools, methods by [`tool_of`], run on a server."""

    _call_tool: Callable[..., Observation]  # takes a tool's remote name, and the call's arguments by remote name


class OpenEnvironment(ServedEnvironment):
    """Environment in a session of a server. Subclasses have the tools of their server."""

    url: str
    media: Mapping[str, str]

    def __init__(self):
        self._session = Session(self.url)
        self._is_done = False
        self.rewards: list[float] = []  # one per step of the episode

    def reset(self, **row: Value) -> Observation:
        """Starts an episode with a row's columns. Servers ignore unknown columns. Media are sent as `null`."""
        self.rewards = []
        with suppress(EnvironmentFailure):  # the server may have closed the session; the second try opens another
            return self._observation(self._session.ask("reset", row, opens=True))
        return self._observation(self._session.ask("reset", row, opens=True))

    def get_reward(self) -> float:
        """Returns the sum of the rewards of the episode's steps."""
        return sum(self.rewards)

    def _call_tool(self, tool: str | None, arguments: Json) -> Observation:
        """Calls an MCP tool, or without `tool` takes a step with `arguments` as the action. Keeps the reward."""
        if self._is_done:
            raise ValueError("The episode has ended; answer without a call.")
        call = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        response = self._session.ask("step", arguments if tool is None else call)
        reward = response.get("reward")
        try:
            numbers_in([reward], 1, "reward", -LARGEST_REWARD, LARGEST_REWARD, optional=True)
        except ValueError as error:
            raise EnvironmentFailure(f"the server's answer {error}") from None
        self.rewards.append(float(reward or 0.0))
        return self._observation(response)

    def _observation(self, response: Json) -> Observation:
        try:
            content = response["observation"]
            self._is_done = bool(response["done"])
        except (KeyError, TypeError):
            raise EnvironmentFailure("the server's answer has no `observation` and `done`") from None
        if "tool_name" in content:  # the result of an MCP tool
            if content.get("error"):
                raise ValueError(content["error"]["message"])
            content = content["result"]
            if isinstance(content, dict) and "content" in content:
                content = content["content"] or content.get("data")  # `data` if the list of blocks is empty
        return observation_of(content, self.media, "The episode has ended." if self._is_done else "")


def openenv(url: str, *, media: Mapping[str, str] | None = None) -> type[OpenEnvironment]:
    """
    Returns a class of environments that a server of [OpenEnv](https://huggingface.co/docs/openenv) runs, for
    `environment_factory`. Each environment has its own session. If the session is lost, the trajectory fails.

    The tools are the server's MCP tools, or else one tool, `step`, with the fields of an action as arguments.
    `data:` URIs and content blocks of observations become media, and everything else becomes text.

    Args:
        url (`str`):
            Address of the server, such as `"http://localhost:8000"`.
        media (`dict[str, str]`, *optional*):
            Modality by field, for fields that hold media in base64, or images as lists of pixels, such as
            `{"screenshot": "image"}`.

    Raises:
        `ImportError`: Without the extra `environments`.
        `ValueError`: If there is no OpenEnv server at the address.
    """
    require_module("websockets", "environments")
    url = url.rstrip("/")
    description = {}
    for page in ("metadata", "schema"):
        try:
            response = requests.get(f"{url}/{page}", timeout=TIMEOUT)
            response.raise_for_status()
            description |= response.json()
        except (requests.RequestException, ValueError, TypeError) as error:
            raise ValueError(
                without_credentials(f"There is no server of OpenEnv at {url}; /{page} failed: {error}")
            ) from None
    action = description["action"]
    tools = {}
    if action["properties"].get("type", {}).get("const") != "call_tool":
        tools["step"] = tool_of("step", action.get("description", "Acts."), action, None)
    else:
        with closing(Session(url)) as session:
            remote_tools = session.ask("step", {"type": "list_tools"}, opens=True)["observation"]["tools"]
        for remote_tool in remote_tools:
            name = tool_name(remote_tool["name"], tools)
            tools[name] = tool_of(name, remote_tool["description"], remote_tool["input_schema"], remote_tool["name"])
    attributes: Json = {"url": url, "media": media or {}, "__doc__": description["description"], **tools}
    return type(re.sub(r"\W", "_", description["name"]), (OpenEnvironment,), attributes)


def tool_name(remote_name: str, tools: Collection[str]) -> str:
    """Returns a valid Python name for a server's tool, distinct from other tools' and methods' names."""
    name = re.sub(r"\W", "_", remote_name).lstrip("_")
    if not name.isidentifier() or iskeyword(name) or hasattr(OpenEnvironment, name) or name in _RESERVED_NAMES:
        name = f"tool_{name}"
    while name in tools:
        name += "_"
    return name


def tool_of(name: str, description: str, schema: Json, remote_name: str | tuple[str, str] | None) -> Callable:
    """
    Returns a method that calls `_call_tool` with the tool's remote name. The method's signature and docstring, from
    which the chat template describes the tool, follow a JSON schema.
    """

    def tool(self: ServedEnvironment, **arguments: Value) -> Observation:
        return self._call_tool(remote_name, {fields.get(key, key): value for key, value in arguments.items()})

    # `lines` of the docstring, `parameters` of the signature, and the schema's `fields` by parameter name
    lines = [" ".join(description.split()), "", "Args:"]
    parameters = []
    fields = {}
    for field, field_schema in schema.get("properties", {}).items():
        if field == "metadata":  # every action has this field, which isn't for a model
            continue
        key = re.sub(r"\W", "_", field)  # a valid name of a parameter in Python
        key = key if key.isidentifier() and not iskeyword(key) and key != "self" else f"field_{key}"
        while key in fields:
            key += "_"
        fields[key] = field
        # Of an optional field, such as `anyOf: [integer, null]`, the first other type counts. A `$ref` is looked up.
        spec = {
            **field_schema,
            **next((option for option in field_schema.get("anyOf", ()) if option.get("type") != "null"), {}),
        }
        spec |= schema.get("$defs", {}).get(spec.get("$ref", "").rpartition("/")[2], {})
        choices = f" (choices: {json.dumps(spec['enum'])})" if "enum" in spec else ""
        lines.append(f"    {key}: {' '.join(field_schema.get('description', key).split())}{choices}")
        default = Parameter.empty if field in schema.get("required", ()) else spec.get("default")
        annotation = _TYPES.get(spec.get("type"), str)
        parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    tool.__name__ = name
    tool.__doc__ = "\n".join(lines)
    tool.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(tool)["__signature__"] = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *parameters])
    return tool


def observation_of(value: Value, media: Mapping[str, str], note: str = "") -> Observation:
    """Returns a value's media and texts, then `note`, as content blocks, or as one text if there are no media."""
    blocks: list[Json] = []
    remainders = [remainder for remainder in _move_blocks(value, blocks, media) if remainder not in (None, {})]
    texts = [remainder if isinstance(remainder, str) else json.dumps(remainder) for remainder in remainders]
    blocks += [{"type": "text", "text": text} for text in (*texts, note) if text]
    return blocks if any(block["type"] != "text" for block in blocks) else "\n".join(block["text"] for block in blocks)


def _pixels(value: Value) -> np.ndarray:
    with suppress(ValueError, TypeError, OverflowError):  # lists may differ in length, or hold texts
        pixels = np.asarray(value)
        has_shape = pixels.ndim in (2, 3) and pixels.size and (pixels.ndim == 2 or pixels.shape[2] in (1, 3, 4))
        if has_shape and np.array_equal(pixels, pixels.astype(np.uint8)):
            return pixels.astype(np.uint8)
    raise EnvironmentFailure(
        "the server shows an image that isn't rows of pixels, whole numbers from 0 to 255 such as [[[255, 0, 0]]]"
    )


def _move_blocks(value: Any, blocks: list[Json], media: Mapping[str, str], modality: str | None = None) -> list[Any]:
    """
    Moves the content blocks of a JSON value to `blocks`, and returns a list with the rest, or an empty one. Blocks
    hold data, never paths or URLs, which a server could choose at will. With a `modality`, the value is base64 or
    lists of pixels.
    """
    n_before = len(blocks)
    block_type = value.get("type") if isinstance(value, dict) else None
    if block_type == "text" and isinstance(value.get("text"), str):
        blocks.append({"type": "text", "text": value["text"]})
        return []
    if block_type in ("image", "audio") and isinstance(value.get("data"), str):
        modality = block_type
        value = value["data"]
    uri = _DATA_URI.match(value) if isinstance(value, str) else None
    if uri:
        modality = uri.group(1)
    if modality is not None and value is not None:
        is_text = isinstance(value, str)
        medium = base64.b64decode(value.rpartition(",")[2], validate=True) if is_text else _pixels(value)
        blocks.append({"type": modality, modality: medium})
        return []
    if isinstance(value, list):
        remainders = [*chain.from_iterable(_move_blocks(item, blocks, media) for item in value)]
        return [remainders] if remainders or len(blocks) == n_before else []
    if not isinstance(value, dict):
        return [value]
    fields = {}
    for key, item in value.items():
        remainders = _move_blocks(item, blocks, media, media.get(key))
        if remainders:
            fields[key] = remainders[0]
    fields = {key: item for key, item in fields.items() if item not in (None, {})}
    if len(blocks) > n_before and fields.keys() <= {"type"}:  # the shell of a block such as `image_url`
        return []
    return [next(iter(fields.values()))] if [*map(type, fields.values())] == [str] else [fields]
