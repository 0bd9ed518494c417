# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Applications of the package OpenEnv, for uvicorn to serve: environments with actions, and with tools of MCP."""

from base64 import b64decode, b64encode
from io import BytesIO
from typing import Any, Literal

import PIL.Image


COLORS = {"red": [200, 0, 0], "green": [0, 200, 0]}


def png(color: str) -> str:
    """Returns a picture in base64."""
    file = BytesIO()
    PIL.Image.new("RGB", (56, 84), tuple(COLORS[color])).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def lamp():
    """Returns an environment of 3 steps that switches a lamp. Its observations have pictures in three forms."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app
    from pydantic import Field

    class Switch(Action):
        """Switches the lamp."""

        color: Literal["red", "green"] = Field(description="The color to show.")
        times: int = Field(default=1, description="How often.")

    class Seen(Observation):
        message: str | None = None
        shown: Any = None
        screenshot: str | None = None
        frame: str | None = None
        thumbnail: list[list[list[int]]] | None = None

    class Lamp(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, episode_id=None, wanted="red", screenshot=None, shown=None) -> Seen:
            self.wanted = wanted
            self.n_steps = 0
            if shown is not None:
                return Seen(shown=shown)
            frame = f"data:image/png;base64,{png('red')}"
            return Seen(message=f"Make it {wanted}.", screenshot=screenshot, frame=frame)

        def step(self, action: Switch, timeout_s=None) -> Seen:
            if action.times > 5:
                raise RuntimeError("too often")
            self.n_steps += 1
            views = {"screenshot": png(action.color), "thumbnail": [[COLORS[action.color]] * 56] * 56}
            reward = 1.0 if action.color == self.wanted else 0.25
            return Seen(message="Clicked.", **views, reward=reward, done=self.n_steps == 3)

    return create_app(Lamp, Switch, Seen, max_concurrent_envs=64)


def album():
    """Returns an environment whose tools of MCP show a picture, or nothing."""
    from fastmcp import FastMCP
    from fastmcp.utilities.types import Image
    from openenv.core.env_server import Observation, State, create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    def show(color: str, note: str = ""):
        """Shows a picture."""
        return [note, Image(data=b64decode(png(color)), format="png")]

    def wipe() -> list:
        """Shows nothing."""
        return []

    class Album(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()
        _step_impl = None

        def __init__(self):
            server = FastMCP("album")
            server.tool(show)
            server.tool(wipe)
            super().__init__(server)

        def reset(self, seed=None, episode_id=None) -> Observation:
            return Observation(metadata={"title": "Colors"})

    return create_app(Album, CallToolAction, CallToolObservation, max_concurrent_envs=2)
