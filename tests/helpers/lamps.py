# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A taskset of the package verifiers, and the servers of its tools."""

import verifiers.v1 as vf
from mcp.types import ImageContent, TextContent

from helpers.openenv_server import png


class Lit(vf.State):
    colors: list[str] = []  # of a rollout's calls, in order


class Data(vf.TaskData):
    wanted: str


class Lamp(vf.Toolset[vf.ToolsetConfig, Lit]):
    wanted, n_calls = "any", 0  # color of the task, and calls of this server by all rollouts

    async def setup_task(self, task):
        self.wanted = task.wanted

    @vf.tool
    def switch(self, color: str) -> list:
        """Switches the lamp."""
        image = ImageContent(type="image", data=png(color), mime_type="image/png")
        self.state.colors.append(color)
        self.n_calls += 1
        text = f"{self.wanted} after {len(self.state.colors)} of {self.n_calls}"
        return [TextContent(type="text", text=text), image]


class Sun(Lamp):
    """A lamp that all tasks share."""


class Task(vf.Task[Data, Lit]):
    async def setup(self, trace, runtime):
        if self.data.wanted == "blue":
            raise RuntimeError("no blue lamps")

    @vf.reward(weight=2.0)
    async def wanted(self, trace):
        return trace.state.colors[-1:] == [self.data.wanted]

    @vf.reward
    async def replies(self, trace):
        calls = [call.id for message in trace.assistant_messages for call in message.tool_calls or ()]
        assert calls == [message.tool_call_id for message in trace.tool_messages]
        # A second call: of a server for one task, and of the server for all tasks
        seen = [text in str(trace.messages) for text in ("green after 2 of 2", "any after 2 of 3")]
        return trace.num_turns / 8 + any(seen) / 16

    @classmethod
    def toolsets(cls, config):
        return [Lamp(vf.ToolsetConfig())]


class Lamps(vf.Taskset[Task]):
    @classmethod
    def toolsets(cls, config):
        return [Sun(vf.ToolsetConfig())]

    def load(self):
        for wanted in ("green", "red", "blue"):
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png('red')}"}}
            question = vf.UserMessage(content=[image, {"type": "text", "text": f"Make it {wanted}."}])
            yield Task(Data(prompt=[question], wanted=wanted), self.config.task)


__all__ = ["Lamps"]

if __name__ == "__main__":
    Lamp.run()
