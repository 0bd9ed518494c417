# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments of the package [verifiers](https://github.com/PrimeIntellect-ai/verifiers), in which the policy acts."""

import asyncio
import atexit
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..data.reading.decoding import require_module
from .environments import EnvironmentFailure
from .openenv import Json, Observation, Value, observation_of, tool_of


@dataclass(frozen=True)
class Episode:
    """What a rollout of verifiers and its environment tell each other."""

    servers: Future = field(default_factory=Future)  # their tools, and a function that calls one
    completion: Future = field(default_factory=Future)  # messages


_EPISODE: ContextVar[Episode] = ContextVar("episode")  # of the rollout that runs


class VerifiersEnvironment:
    """A rollout of a task. Subclasses have the tools of its servers."""

    rows: list[Json]
    _loop: asyncio.AbstractEventLoop
    _start: Callable[[int, Episode], Future]
    _run: Future | None = None

    def reset(self, task: int, **row: Value) -> None:
        """Starts the servers of a task, for which its tools wait."""
        self._leave()
        self._episode = Episode()
        self._run = self._start(task, self._episode)

    async def get_reward(self, completion: list[Json]) -> float:
        """The weighted sum of the task's rewards."""
        with suppress(InvalidStateError):  # the rollout has ended
            self._episode.completion.set_result(completion)
        return await asyncio.wrap_future(self._run)

    def _act(self, name: str, arguments: Json) -> Observation:
        _, call = self._episode.servers.result()
        try:
            answer = asyncio.run_coroutine_threadsafe(call(name, arguments), self._loop).result()
        except Exception as error:
            raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error
        seen = observation_of([block.model_dump() for block in answer.content], {})
        if answer.is_error:
            raise ValueError(seen)
        return seen

    def _leave(self) -> None:
        if self._run is not None:
            self._run.cancel()

    __del__ = _leave


def verifiers_environment(taskset: str, n_tasks: int | None = None, **options: Any) -> type[VerifiersEnvironment]:
    """
    Class of the environments that the tasks of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) (`v1`) are
    played in, for `environment_factory`; its `rows` are those of the dataset.

    Tools are those of the task's servers, which run on this machine. Rewards read the conversation's texts.

    Args:
        taskset (`str`):
            Name of an installed taskset.
        n_tasks (`int`, *optional*):
            How many of its tasks; all by default.
        options:
            Fields of the taskset's configuration.

    Raises:
        `ImportError`: Without the extra `verifiers`.
        `ValueError`: If the taskset needs more than one agent's turns and tools.
    """
    vf: Any = require_module("verifiers.v1", "verifiers")
    client: Any = require_module("mcp", "verifiers").Client

    class Policy(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            tools, places = [], {}
            for server, url in mcp_urls.items():
                async with client(url) as connection:
                    for tool in (await connection.list_tools()).tools:
                        name = f"{server}_{tool.name}" if server else tool.name
                        places[name] = (url, tool.name)
                        tools.append((name, tool.description or name, tool.input_schema))

            async def call(name: str, arguments: Json) -> Any:
                url, tool = places[name]
                async with client(url) as connection:
                    return await connection.call_tool(tool, arguments)

            episode = _EPISODE.get()
            episode.servers.set_result((tools, call))
            completion = await asyncio.wrap_future(episode.completion)
            for is_sampled, messages in ((False, _prompt(vf, data)), (True, _sampled(vf, completion))):
                for message in messages:
                    before = len(trace.nodes) - 1 if trace.nodes else None
                    is_turn = is_sampled and message.role == "assistant"
                    trace.nodes.append(vf.MessageNode(parent=before, message=message, sampled=is_turn))
            return vf.ProgramResult(0, "", "")

    class Played(vf.SingleAgentEnv):
        async def setup(self, agents):
            agents.agent.harness = Policy(vf.HarnessConfig(id="null"))

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": taskset, **options}, "agent": agent}
    env = Played(vf.SingleAgentEnvConfig.model_validate(config))
    if not env.taskset.bounded and n_tasks is None:
        raise ValueError(f"The taskset {taskset!r} never ends; pass `n_tasks`.")
    tasks = [*(env.taskset if n_tasks is None else env.taskset.take(n_tasks))]
    hooks = [name for name in dir(tasks[0]) if hasattr(getattr(type(tasks[0]), name, None), "intercept")]
    if type(env).__mro__[1] is not vf.environment_class(taskset) or any(each.data.prompt is None for each in tasks):
        raise ValueError(f"The tasks of {taskset!r} need turns of a user or of other agents, which there aren't here.")
    if hooks or tasks[0].hooks("stop"):
        raise ValueError(f"The tasks of {taskset!r} stop or change requests, which there aren't here.")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    serving = env.serving()
    asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result())
    context = vf.ModelContext("policy", vf.EvalClientConfig())

    async def play(task: int, episode: Episode) -> float:
        _EPISODE.set(episode)
        try:
            played = await env.run_episode(tasks[task], context)
            errors = [f"{each.type}: {each.message}" for part in (played, *played.traces) for each in part.errors]
            if errors or not episode.completion.done() or episode.completion.cancelled():
                raise EnvironmentFailure(errors[-1] if errors else f"ended by {played.traces[0].stop_condition}")
            return played.traces[0].reward
        except BaseException as error:
            if not episode.servers.done():
                episode.servers.set_exception(error)
            raise

    def start(task: int, episode: Episode) -> Future:
        return asyncio.run_coroutine_threadsafe(play(task, episode), loop)

    first = Episode()
    run = start(0, first)
    tools, _ = first.servers.result()
    run.cancel()
    rows = [{"prompt": [*map(_row, _prompt(vf, each.data))], "task": i} for i, each in enumerate(tasks)]
    parts: Json = {"rows": rows, "_loop": loop, "_start": staticmethod(start)}
    parts |= {each[0]: tool_of(*each, VerifiersEnvironment._act) for each in tools}
    return type(re.sub(r"\W", "_", taskset), (VerifiersEnvironment,), parts)


def _prompt(vf: Any, data: Any) -> list[Any]:
    """The messages that a task begins with."""
    asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    return [vf.SystemMessage(content=data.system_prompt), *asked] if data.system_prompt else asked


def _row(message: Any) -> Json:
    """A message of a task as one of a dataset."""
    found = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str):
        urls = [each.image_url.url if each.type == "image_url" else None for each in message.content]
    return found


def _sampled(vf: Any, completion: list[Json]) -> Iterator[Any]:
    """A completion as messages of verifiers."""
    ids: Iterator[str] = iter(())
    for turn, message in enumerate(completion):
        if message["role"] == "tool":
            content = message["content"]
            if not isinstance(content, str):
                content = "\n".join(block["text"] for block in content if block["type"] == "text")
            yield vf.ToolMessage(tool_call_id=next(ids), name=message["name"], content=content)
            continue
        calls = [
            vf.ToolCall(id=f"{turn}-{i}", name=each["function"]["name"], arguments=json.dumps(each["function"]["arguments"]))
            for i, each in enumerate(message.get("tool_calls") or ())
        ]
        ids = iter([each.id for each in calls])
        yield vf.AssistantMessage(
            content=message.get("content"), reasoning_content=message.get("reasoning_content"), tool_calls=calls or None
        )
