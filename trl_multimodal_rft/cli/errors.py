# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Input errors, which a command shows in one line."""

import os
import re
import sys
from pathlib import Path

from ..credentials import masked
from ..printable import printable
from ..rewards.failures import RewardError
from ..versions import unfit_packages


# Environment variable with the folder for input errors of launched processes. The command shows the first error.
ERROR_FOLDER_VARIABLE = "TRL_MULTIMODAL_RFT_ERRORS"


def one_line(text: str) -> str:
    """Returns a message without line breaks, and without characters that control a terminal."""
    return printable(re.sub(r"\s*\n\s*", " ", text.strip()))


# Packages whose errors explain wrong input
_CHECKING_PACKAGES = {"trl_multimodal_rft", "trl", "transformers", "huggingface_hub", "datasets", "accelerate", "peft"}


def input_error(error: BaseException) -> str | None:
    """Returns the message, in one line, of an input error or of a reward function's error; `None` for other errors."""
    if isinstance(error, RewardError):
        return masked(one_line(str(error)))
    unfit = unfit_packages(error)
    if unfit is not None:
        return unfit
    if not isinstance(error, (ValueError, ImportError, OSError, FloatingPointError)):
        return None
    # The package that raised the error, directly or by a call of the standard library
    raising_package = ""
    frame = error.__traceback__
    while frame is not None:
        package = str(frame.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        raising_package = raising_package if package in sys.stdlib_module_names else package
        frame = frame.tb_next
    return masked(one_line(str(error))) if raising_package in _CHECKING_PACKAGES else None


def write_input_error(error: BaseException) -> None:
    """
    Writes an input error of a launched process to the folder in `ERROR_FOLDER_VARIABLE`, where the command reads it.
    For an error of a reward function, also prints the traceback of the user's code. Raises other errors, unless
    another process has written its input error and ended: then this process has only lost its connection.
    """
    text = input_error(error)
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    if text is None and folder is not None and isinstance(error, RuntimeError) and any(Path(folder).iterdir()):
        return
    if text is None or folder is None:
        raise error
    if isinstance(error, RewardError):
        print(masked(error.user_traceback()), file=sys.stderr)
    Path(folder, os.environ.get("RANK", "0")).write_text(text, encoding="utf-8")
