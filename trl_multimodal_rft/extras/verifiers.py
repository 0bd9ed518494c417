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
    """
    Environment of a task. Subclasses have the tools of their taskset.

    `_play` is a generator in the event loop of all rollouts: its first value is the servers' URLs, for the tools. It
    then receives the completion, and its second value is the reward.
    """

    rows: list[Json]
    tasks: list["Task"]
    agent: "Agent"  # agent whose harness records the URLs of servers
    shared: Json  # tool servers that all tasks share
    _run: Callable[[Any], Any]  # runs a coroutine in the event loop of all rollouts

    def reset(self, task: int, **row: Value) -> None:
        """Starts the servers of a task. Tool calls wait until the servers run."""
        if hasattr(self, "_rollout"):  # closes the last rollout, which may have ended without a reward
            self._url_future.cancel()
            self._run(self._rollout.aclose())
        self._rollout = self._play(task)
        self._url_future = self._run(anext(self._rollout))  # future of the servers' URLs by name

    async def get_reward(self, completion: list[Json]) -> float:
        """Returns the weighted sum of the task's rewards."""
        await asyncio.wrap_future(self._url_future)
        return await asyncio.wrap_future(self._run(self._rollout.asend(completion)))

    def _call_tool(self, tool: tuple[str, str], arguments: Json) -> Observation:
        server, name = tool
        try:
            result = self._run(_call_server(self._url_future.result()[server], "call_tool", name, arguments)).result()
        except Exception as error:
            raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error
        content = observation_of([block.model_dump() for block in result.content] or None, {})
        if result.is_error:
            raise ValueError(content)
        return content

    async def _play(self, task: int) -> AsyncGenerator[Any, list[Json]]:
        """Yields the URLs of a task's servers by name, receives the completion, and yields its reward."""
        vf = require_module("verifiers.v1", "verifiers")
        prompt = self.rows[task]["prompt"]
        async with self.agent.interaction(self.tasks[task], tools=self.shared) as interaction:
            completion = yield interaction.trace.info["urls"]
            # The trace is a tree of messages. Here, each message has the one before it as parent.
            for i, json_message in enumerate([*prompt, *_with_call_ids(completion)]):
                is_sampled = json_message["role"] == "assistant" and i >= len(prompt)
                message = vf.dialects.parse_message(json_message)
                node = vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=is_sampled)
                interaction.trace.nodes.append(node)
        # The end of the interaction has computed the rewards
        for error in interaction.trace.errors:
            raise EnvironmentFailure(f"{error.type}: {error.message}")
        yield interaction.trace.reward


def verifiers_environment(taskset: str, **options: Value) -> type[VerifiersEnvironment]:
    """
    Returns a class of environments for tasks of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) (`v1`),
    for `environment_factory`. Its attribute `rows` holds the rows of the dataset.

    The tools come from the tasks' servers, which run on this machine. Rewards read the texts of the conversation.

    Args:
        taskset (`str`):
            Name of an installed taskset.
        options:
            Fields of the taskset's configuration.

    Raises:
        `ImportError`: Without the extra `verifiers`.
        `ValueError`: If the list of tasks is endless or empty, or if tasks need a user, other agents, or hooks of
            requests.
    """
    vf = require_module("verifiers.v1", "verifiers")
    harness_class = require_module("verifiers.v1.harnesses.null", "verifiers").NullHarness

    class Policy(harness_class):
        """Harness that records the URLs of a rollout's servers. It runs no program, because the trainer samples."""

        async def setup(self, runtime):
            pass

        async def session(self, *arguments: Any, **options: str | None) -> "HarnessSession":
            session = await super().session(*arguments, **options)
            session.trace.info["urls"] = session.mcp_urls
            return session

    config = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"}, model="policy")
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": taskset, **options}, agent=config))
    tasks = [*env.taskset] if env.taskset.bounded else []
    task_class = env.taskset.task_type()
    # Both kinds of hooks act on the requests of a harness, and would never run, because the trainer samples
    hooks = [name for name in dir(task_class) if hasattr(getattr(task_class, name), "intercept")]
    if tasks:
        hooks += tasks[0].hooks("stop")
    is_single_agent = vf.environment_class(taskset) is vf.SingleAgentEnv and all(task.data.prompt for task in tasks)
    if not tasks or hooks or not is_single_agent:
        raise ValueError(
            f"The taskset {taskset!r} is endless or empty, or its tasks need a user, other agents, or hooks of "
            "requests; name another taskset."
        )
    agent = vf.Agent(config)
    serving = env.shared_tools()
    loop = asyncio.new_event_loop()
    agent.harness = Policy(agent.harness.config)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    run = partial(asyncio.run_coroutine_threadsafe, loop=loop)

    async def start_servers() -> tuple[Json, list[Any]]:
        """Starts servers. Returns the shared servers, and the (name, tools) of each server of the first task."""
        shared = await serving.__aenter__()
        async with agent.interaction(tasks[0].defer_scoring(), tools=shared) as interaction:
            return shared, [
                (name, await _call_server(url, "list_tools")) for name, url in interaction.trace.info["urls"].items()
            ]

    shared, tool_lists = run(start_servers()).result()
    rows = [{"prompt": _prompt_of(task.data), "task": i} for i, task in enumerate(tasks)]
    attributes: Json = {"rows": rows, "tasks": tasks, "agent": agent, "shared": shared, "_run": staticmethod(run)}
    attributes["_serving"] = serving  # this object keeps the servers running
    for server, tool_list in tool_lists:
        for tool in tool_list.tools:
            name = f"{server}_{tool.name}".removeprefix("_")
            attributes[name] = tool_of(name, tool.description or name, tool.input_schema, (server, tool.name))
    return type(re.sub(r"\W", "_", taskset), (VerifiersEnvironment,), attributes)


async def _call_server(url: str, method: str, *arguments: str | Json) -> "ListToolsResult | CallToolResult":
    async with asyncio.timeout(TIMEOUT), require_module("mcp", "verifiers").Client(url) as client:
        return await getattr(client, method)(*arguments)


def _prompt_of(data: "TaskData") -> list[Json]:
    prompt = data.model_dump(exclude_none=True)["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages


def _with_call_ids(completion: list[Json]) -> Iterator[Json]:
    """Yields messages in OpenAI's format. Calls get ids in order, and the result `n` refers to the call `n`."""
    call_numbers = itertools.count()
    result_numbers = itertools.count()
    for message in completion:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        functions = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
        calls = [{"id": f"call_{next(call_numbers)}", "function": function} for function in functions]
        ids = {"tool_call_id": f"call_{next(result_numbers)}"} if message["role"] == "tool" else {"tool_calls": calls}
        yield {**message, **ids}
