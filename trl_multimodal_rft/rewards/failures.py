# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Errors of users' reward functions, with the traceback of the users' code alone. Imports nothing heavy."""

import os
import sysconfig
import traceback
from pathlib import Path

from ..printable import printable


_PATHS = sysconfig.get_paths()
# Folders of code that isn't the user's: this package, the standard library and installed packages
_FOREIGN = [str(Path(__file__).parents[1]), *(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))]


class RewardError(RuntimeError):
    """An error of a user's reward function, raised from the function's own error."""

    def __init__(self, message: str):
        super().__init__(printable(message))

    def user_traceback(self) -> str:
        """Returns the traceback of the function's error, with frames of the user's code alone."""
        cause = self.__cause__ or self
        lines = ["Traceback of the reward function (most recent call last):\n"]
        lines += traceback.format_list(user_frames(cause))
        return printable("".join(lines + traceback.format_exception_only(cause)))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the user's code in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign_prefixes = ("<frozen", *(f"{folder}{os.sep}" for folder in _FOREIGN))
    return [frame for frame in frames if not frame.filename.startswith(foreign_prefixes)]


def line_of(frame: traceback.FrameSummary) -> str:
    """Returns a frame's file and line, with a path relative to the working directory if the file lies in it."""
    path = os.path.relpath(frame.filename) if Path(frame.filename).is_relative_to(Path.cwd()) else frame.filename
    return f"{path}:{frame.lineno}"
