# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`--config` of commands that look at a run and start none."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from ..scripts.launching import read_keys, with_path


def add_config(parser: argparse.ArgumentParser) -> None:
    """
    Adds the option.

    Args:
        parser (`argparse.ArgumentParser`):
            Parser of a command.
    """
    parser.add_argument(
        "--config",
        help="file of a run, or a recipe of this package by its name, of which this command takes what it knows",
    )


def with_recipe(
    parser: argparse.ArgumentParser, argv: Sequence[str], rename: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[str]:
    """
    A command line with what its `--config` says before it, so that the command line wins.

    Args:
        parser (`argparse.ArgumentParser`):
            The command's parser.
        argv (`Sequence[str]`):
            Arguments.
        rename (`Callable`):
            Gives keys of a run the names of the command's options.

    Returns:
        `list[str]`: Arguments.

    Raises:
        `ValueError`: If there is no such file or recipe, or it has no names with values.
    """
    argv = with_path(argv, "--config", "recipes")
    if "--config" not in argv:
        return argv
    words: list[str] = []
    keys = rename(read_keys(argv[argv.index("--config") + 1]))
    for action in parser._actions:
        value = keys.get(action.dest)
        if value is None:
            continue
        option = f"--{action.dest}"
        if action.nargs == 0:  # a switch
            name = option if value else f"--no-{action.dest}"
            words += [name] if name in action.option_strings else []
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*words, *argv]
