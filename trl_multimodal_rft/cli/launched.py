# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Entry point for `accelerate launch`: runs the script of a command with its arguments."""

import atexit
import importlib
import sys

from ..launchers import end_with_launcher, end_with_others, end_without_teardown
from ..lazy import uncollected_imports
from .errors import write_error
from .foreign import hide_lines
from .options import options_of
from .words import translated_logs


if __name__ == "__main__":
    atexit.register(end_without_teardown)  # before all others, so that it runs after them
    end_with_others()
    try:
        with translated_logs([option["name"] for option in options_of(sys.argv[1])]):
            with uncollected_imports():
                end_with_launcher()
                hide_lines()
                script = importlib.import_module(f"{__package__}.commands").script_of(sys.argv[1])
                arguments = importlib.import_module(f"{__package__}.arguments").parse(script.ARGUMENTS, sys.argv[2:])
            script.main(*arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        write_error(error, shows_traceback="--debug" in sys.argv)
        sys.exit(1)
