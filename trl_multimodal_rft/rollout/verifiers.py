# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments of the package [verifiers](https://github.com/PrimeIntellect-ai/verifiers), played by the policy."""

import asyncio
import atexit
import itertools
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from ..data.reading.decoding import require_module
from .environments import EnvironmentFailure
from .openenv import Json, Observation, Value, observation_of, tool_of


class VerifiersEnvironment:
    """A rollout of a task. Subclasses have its tools."""

    rows: list[Json]
    tasks: list[Any]
    episode: Any  # a coroutine function of verifiers
    loop: asyncio.AbstractEventLoop
    run: Future = Future()

    def reset(self, task: int, **row: Value) -> None:
        """Starts the servers of a task, for which its tools wait."""
        self.run.cancel()
        self.call, self.completion = Future(), Future()
        self.run = asyncio.run_coroutine_threadsafe(self._play(self.tasks[task]), self.loop)

    async def get_reward(self, completion: list[Json]) -> float:
        """The weighted sum of the task's rewards."""
        with suppress(InvalidStateError):  # the rollout has ended
            self.completion.set_result(completion)
        return await asyncio.wrap_future(self.run)

    def _act(self, name: str, arguments: Json) -> Observation:
        call = self.call.result()
        try:
            answer = asyncio.run_coroutine_threadsafe(call(name, arguments), self.loop).result()
        except Exception as error:
            raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error
        seen = observation_of([block.model_dump() for block in answer.content], {})
        if answer.is_error:
            raise ValueError(seen)
        return seen

    async def _play(self, task: Any) -> float:
        _PLAYED.set(self)
        played = await self.episode(task)
        errors = [f"{each.type}: {each.message}" for part in (played, *played.traces) for each in part.errors]
        if not errors and self.completion.done() and not self.completion.cancelled():
            return played.traces[0].reward
        failure = EnvironmentFailure(errors[-1] if errors else f"ended by {played.traces[0].stop_condition}")
        if not self.call.done():
            self.call.set_exception(failure)
        raise failure


_PLAYED: ContextVar[VerifiersEnvironment] = ContextVar("played")  # by the rollout that runs


def verifiers_environment(taskset: str, **options: Any) -> type[VerifiersEnvironment]:
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
    vf: Any = require_module("verifiers.v1", "verifiers")
    parse_message = require_module("verifiers.v1.dialects", "verifiers").parse_message
    client: Any = require_module("mcp", "verifiers").Client
    loop, tools = asyncio.new_event_loop(), {}

    class Policy(vf.Harness[vf.HarnessConfig]):
        SUPPORTS_MCP, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            async def ask(url: str, method: str, *arguments: Any) -> Any:
                async with client(url) as connection:
                    return await getattr(connection, method)(*arguments)

            listed = [(name, url, await ask(url, "list_tools")) for name, url in mcp_urls.items()]
            found = {(name and f"{name}_") + each.name: (url, each) for name, url, all in listed for each in all.tools}
            for name, (_, tool) in found.items():
                tools[name] = tool_of(name, tool.description or name, tool.input_schema)

            async def call(name: str, arguments: Json) -> Any:
                url, tool = found[name]
                return await ask(url, "call_tool", tool.name, arguments)

            _PLAYED.get().call.set_result(call)
            said, asked = _chat(await asyncio.wrap_future(_PLAYED.get().completion)), prompt_of(data)
            for i, each in enumerate([*asked, *map(parse_message, said)]):
                is_sampled = each.role == "assistant" and i >= len(asked)
                trace.nodes.append(vf.MessageNode(parent=i - 1 if i else None, message=each, sampled=is_sampled))
            return vf.ProgramResult(0, "", "")

    class Played(vf.SingleAgentEnv):
        async def setup(self, agents):
            agents.agent.harness = Policy(vf.HarnessConfig(id="null"))

    def prompt_of(data: Any) -> list[Any]:
        asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        return [vf.SystemMessage(content=data.system_prompt), *asked] if data.system_prompt else asked

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = Played(vf.SingleAgentEnvConfig(taskset={"id": taskset, **options}, agent=agent))
    tasks, kind = [*env.taskset] if env.taskset.bounded else [], env.taskset.task_type()
    hooks = [name for name in dir(kind) if hasattr(getattr(kind, name), "intercept")]
    hooks += [each for task in tasks[:1] for each in task.hooks("stop")]
    is_alone = vf.environment_class(taskset) is vf.SingleAgentEnv and all(each.data.prompt for each in tasks)
    if not tasks or hooks or not is_alone:
        raise ValueError(f"The tasks of {taskset!r} never end, or need a user, other agents, or hooks of requests.")
    threading.Thread(target=loop.run_forever, daemon=True).start()
    serving, model = env.serving(), vf.ModelContext("policy", vf.EvalClientConfig())
    asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result())
    prompts = [[message.model_dump(exclude_none=True) for message in prompt_of(each.data)] for each in tasks]
    rows = [{"prompt": prompt, "task": i} for i, prompt in enumerate(prompts)]
    parts: Json = {"rows": rows, "tasks": tasks, "loop": loop, "episode": partial(env.run_episode, ctx=model)}
    first = type(re.sub(r"\W", "_", taskset), (VerifiersEnvironment,), parts)()
    first.reset(0)
    first.call.result()
    first.run.cancel()
    return type(type(first).__name__, (VerifiersEnvironment,), parts | tools)


def _chat(completion: list[Json]) -> Iterator[Json]:
    """Messages as OpenAI's, whose results name their calls."""
    asked, answered = itertools.count(), itertools.count()
    for message in completion:
        if message["role"] == "tool":
            yield {**message, "tool_call_id": f"call_{next(answered)}"}
            continue
        functions = [each["function"] for each in message.get("tool_calls") or ()]
        functions = [{**each, "arguments": json.dumps(each["arguments"])} for each in functions]
        calls = [{"type": "function", "id": f"call_{next(asked)}", "function": each} for each in functions]
        yield {**message, "tool_calls": calls}
