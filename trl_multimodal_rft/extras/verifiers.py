# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments of the package [verifiers](https://github.com/PrimeIntellect-ai/verifiers), played by the policy."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..data.reading.decoding import require_module
from ..rollout.environments import EnvironmentFailure
from .openenv import TIMEOUT, Json, Observation, ServedEnvironment, Value, observation_of, tool_of


if TYPE_CHECKING:
    from mcp.types import CallToolResult, ListToolsResult
    from verifiers.v1 import Agent, HarnessSession, Task, TaskData


class VerifiersEnvironment(ServedEnvironment):
    """A rollout of a task. Subclasses have its tools."""

    rows: list[Json]
    tasks: list["Task"]
    agent: "Agent"  # with the harness below
    shared: Json  # servers of all tasks
    _run: Callable[[Any], Any]  # runs a coroutine in the event loop of all rollouts

    def reset(self, task: int, **row: Value) -> None:
        """Starts the servers of a task, for which its tools wait."""
        if hasattr(self, "_rollout"):  # which may have no reward yet
            self._urls.cancel()
            self._run(self._rollout.aclose())
        self._rollout = self._play(task)
        self._urls = self._run(anext(self._rollout))

    async def get_reward(self, completion: list[Json]) -> float:
        """The weighted sum of the task's rewards."""
        await asyncio.wrap_future(self._urls)
        return await asyncio.wrap_future(self._run(self._rollout.asend(completion)))

    def _act(self, tool: tuple[str, str], arguments: Json) -> Observation:
        server, name = tool
        try:
            answer = self._run(_ask(self._urls.result()[server], "call_tool", name, arguments)).result()
        except Exception as error:
            raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error
        seen = observation_of([block.model_dump() for block in answer.content] or None, {})
        if answer.is_error:
            raise ValueError(seen)
        return seen

    async def _play(self, task: int) -> AsyncGenerator[Any, list[Json]]:
        """Yields the addresses of a task's servers, is sent the completion, and yields its reward."""
        vf = require_module("verifiers.v1", "verifiers")
        asked = self.rows[task]["prompt"]
        async with self.agent.interaction(self.tasks[task], tools=self.shared) as played:
            completion = yield played.trace.info["urls"]
            for i, each in enumerate([*asked, *_with_ids(completion)]):
                is_sampled, message = each["role"] == "assistant" and i >= len(asked), vf.dialects.parse_message(each)
                node = vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=is_sampled)
                played.trace.nodes.append(node)
        for error in played.trace.errors:
            raise EnvironmentFailure(f"{error.type}: {error.message}")
        yield played.trace.reward


def verifiers_environment(taskset: str, **options: Value) -> type[VerifiersEnvironment]:
    """
    Class of the environments in which tasks of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) (`v1`) are
    played, for `environment_factory`; its `rows` are the dataset's.

    Tools are those of the tasks' servers, which run on this machine. Rewards read the texts of the conversation.

    Args:
        taskset (`str`):
            Name of an installed taskset.
        options:
            Fields of its configuration.

    Raises:
        `ImportError`: Without the extra `verifiers`.
        `ValueError`: If the tasks never end, or need more than one agent with tools.
    """
    vf = require_module("verifiers.v1", "verifiers")
    program = require_module("verifiers.v1.harnesses.null", "verifiers").NullHarness

    class Policy(program):
        """Samples in the trainer, not in a program, and tells where a rollout's servers are."""

        async def setup(self, runtime):
            pass

        async def session(self, *arguments: Any, **options: str | None) -> "HarnessSession":
            session = await super().session(*arguments, **options)
            session.trace.info["urls"] = session.mcp_urls
            return session

    config = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"}, model="policy")
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": taskset, **options}, agent=config))
    tasks, kind = [*env.taskset] if env.taskset.bounded else [], env.taskset.task_type()
    hooks = [name for name in dir(kind) if hasattr(getattr(kind, name), "intercept")]
    hooks += [each for task in tasks[:1] for each in task.hooks("stop")]
    is_alone = vf.environment_class(taskset) is vf.SingleAgentEnv and all(each.data.prompt for each in tasks)
    if not tasks or hooks or not is_alone:
        raise ValueError(f"The tasks of {taskset!r} never end, or need a user, other agents, or hooks of requests.")
    agent, serving, loop = vf.Agent(config), env.shared_tools(), asyncio.new_event_loop()
    agent.harness = Policy(agent.harness.config)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    run = partial(asyncio.run_coroutine_threadsafe, loop=loop)

    async def start() -> tuple[Json, list[Any]]:
        shared = await serving.__aenter__()
        async with agent.interaction(tasks[0].defer_scoring(), tools=shared) as played:
            return shared, [(name, await _ask(url, "list_tools")) for name, url in played.trace.info["urls"].items()]

    shared, listed = run(start()).result()
    rows = [{"prompt": _prompt_of(task.data), "task": i} for i, task in enumerate(tasks)]
    parts: Json = {"rows": rows, "tasks": tasks, "agent": agent, "shared": shared, "_run": staticmethod(run)}
    parts["_serving"] = serving  # whose servers end with it
    for server, tool in ((server, tool) for server, answer in listed for tool in answer.tools):
        name = f"{server}_{tool.name}".removeprefix("_")
        parts[name] = tool_of(name, tool.description or name, tool.input_schema, (server, tool.name))
    return type(re.sub(r"\W", "_", taskset), (VerifiersEnvironment,), parts)


async def _ask(url: str, method: str, *arguments: str | Json) -> "ListToolsResult | CallToolResult":
    async with asyncio.timeout(TIMEOUT), require_module("mcp", "verifiers").Client(url) as client:
        return await getattr(client, method)(*arguments)


def _prompt_of(data: "TaskData") -> list[Json]:
    """Messages of a task's prompt, as OpenAI's."""
    prompt = data.model_dump(exclude_none=True)["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": data.system_prompt}, *asked] if data.system_prompt else asked


def _with_ids(completion: list[Json]) -> Iterator[Json]:
    """Messages as OpenAI's, whose results name their calls."""
    asked, answered = itertools.count(), itertools.count()
    for message in completion:
        functions = [each["function"] for each in message.get("tool_calls") or ()]
        functions = [{**each, "arguments": json.dumps(each["arguments"])} for each in functions]
        calls = [{"id": f"call_{next(asked)}", "function": each} for each in functions]
        own = {"tool_call_id": f"call_{next(answered)}"} if message["role"] == "tool" else {"tool_calls": calls}
        yield {**message, **own}
