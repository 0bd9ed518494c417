# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Errors that end a command: input errors are shown in one line, and how far a run came stands in the last lines."""

import re
import sys
import traceback

from ..credentials import masked
from ..launchers import error_file, follows_another
from ..printable import printable
from ..rewards.failures import RewardError
from ..versions import unfit_packages


def one_line(text: str) -> str:
    """Returns a message without line breaks, and without characters that control a terminal."""
    return printable(re.sub(r"\s*\n\s*", " ", text.strip()))


# Packages whose errors explain wrong input
_PACKAGE = __name__.partition(".")[0]
_CHECKING_PACKAGES = {_PACKAGE, "trl", "transformers", "huggingface_hub", "datasets", "accelerate", "peft"}


def input_error(error: BaseException) -> str | None:
    """Returns the message, in one line, of an input error or of a reward function's error; `None` for other errors."""
    if isinstance(error, RewardError):
        return masked(one_line(str(error)))
    unfit = unfit_packages(error)
    if unfit is not None:
        return unfit
    # The package that raised the error, directly or by a call of the standard library
    raising_package = ""
    frame = error.__traceback__
    while frame is not None:
        package = str(frame.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        raising_package = raising_package if package in sys.stdlib_module_names else package
        frame = frame.tb_next
    if isinstance(error, (ValueError, ImportError, OSError, FloatingPointError)):
        explains = raising_package in _CHECKING_PACKAGES
    elif isinstance(error, (RuntimeError, TypeError)) and raising_package == _PACKAGE:
        # As the error of a self-check, unlike one that a call of torch raises
        explains = (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise ")
    else:
        explains = False
    return masked(one_line(str(error))) if explains else None


def write_end(error: BaseException, note: str) -> bool:
    """
    Writes how far a run came before an error to the file of this process, which the command reads. Returns whether
    there is a command. Does nothing after an error of another process, from which this one has lost its connection.
    """
    file = error_file()
    if file is not None and not follows_another(error):
        file.write_text(f"{one_line(note)}\n", encoding="utf-8")
    return file is not None


def write_error(error: BaseException, shows_traceback: bool) -> None:
    """
    Writes the line of an error to the file of this process, and prints the traceback: that of an input error on
    request, that of a reward function's error with the user's code alone. Does nothing where [`write_end`] does not.
    """
    file = error_file()
    if follows_another(error):
        return
    text = None if shows_traceback or file is None else input_error(error)
    if text is None:
        sys.excepthook(type(error), error, error.__traceback__)
        text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    else:
        if isinstance(error, RewardError):
            print(masked(error.user_traceback()), file=sys.stderr)
        text += " (`--debug` shows the traceback)"
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(masked(one_line(text)))
