# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which arguments are for `accelerate launch`, and which for the script that it launches."""

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser


def shipped(folder: str, name: str) -> str:
    """
    A YAML file, which may be one of those that come with this package.

    Args:
        folder (`str`):
            Folder of the package.
        name (`str`):
            Path of a file, or the name of one in that folder, without `.yaml`.

    Returns:
        `str`: Path of the file.

    Raises:
        `ValueError`: If there is neither. The message has the names.
    """
    if Path(name).is_file():
        return name
    root = Path(str(importlib.resources.files("trl_multimodal_rft").joinpath(folder)))
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    if name not in files:
        raise ValueError(f"{name!r} is no file, and not one of {', '.join(files)}, which come with this package.")
    return str(files[name])


def split_arguments(parser: TrlParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Divides a command line.

    Args:
        parser ([`~trl.TrlParser`]):
            The script's parser. Asked for help, it prints it and exits.
        argv (`Sequence[str]`):
            Arguments of both, whose `--config` may name a recipe of this package and have keys of both.

    Returns:
        `tuple[list[str], list[str]]`: Arguments of `accelerate launch` and arguments of the script.

    Raises:
        `ValueError`: If an argument is of neither.
    """
    argv = words = with_path(argv, "--config", "recipes")
    of_file: list[str] = []
    if "--config" in argv:
        place = argv.index("--config")
        words = [*argv[:place], *argv[place + 2 :]]
        of_file = _of_file(parser, argv[place + 1])
    # The config itself is made in the processes that are launched, as it takes hold of their devices
    _, unknown = parser.parse_known_args(words)
    script, left = [], list(unknown)  # which are among the arguments, in this order
    for argument in argv:
        if left and argument == left[0]:
            left.pop(0)
        else:
            script.append(argument)
    return launcher_arguments([*of_file, *unknown]), script


def read_keys(path: str) -> dict[str, Any]:
    """
    What a config file says.

    Args:
        path (`str`):
            Path of the YAML file.

    Returns:
        `dict[str, Any]`: Values by their names.

    Raises:
        `ValueError`: If it has no names with values.
    """
    keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(keys, dict):
        raise ValueError(f"{path} has no names with values.")
    return keys


def _of_file(parser: TrlParser, path: str) -> list[str]:
    """Gives the parser what a config file says, as [`~trl.TrlParser`] does. What it doesn't know, as words."""
    keys = read_keys(path)
    os.environ.update({name: str(value) for name, value in (keys.pop("env", None) or {}).items()})
    return parser.set_defaults_with_config(**keys)


def launcher_arguments(argv: Sequence[str]) -> list[str]:
    """
    Arguments of `accelerate launch` as it takes them.

    Args:
        argv (`Sequence[str]`):
            Its arguments, those of a config file as words, too, and `--accelerate_config`, which names a file or one
            of those that come with this package.

    Returns:
        `list[str]`: Without `--accelerate_config`, and with switches that have no value.

    Raises:
        `ValueError`: If one isn't its own.
    """
    argv = with_path(argv, "--accelerate_config", "accelerate_configs")
    defaults = vars(launch_command_parser().parse_args(["script"]))
    arguments: list[str] = []
    option = ""  # the one before, if it takes a value
    for word in argv:
        if not word.startswith("-"):
            is_switch = isinstance(defaults.get(option), bool) and word in ("True", "False")  # in a config file
            if not option or (isinstance(defaults.get(option), bool) and not is_switch):
                raise ValueError(f"{word!r} belongs to no argument.")
            if not is_switch:
                arguments.append(word)
            elif word == "False":
                arguments.pop()
            option = ""
            continue
        name, _, value = word.partition("=")
        option = "" if value else name.removeprefix("--").replace("-", "_")
        if word == "--accelerate_config":
            word = "--config_file"
        elif name.startswith("--") and name.removeprefix("--").replace("-", "_") not in defaults:
            raise ValueError(f"There is no argument {name!r}, neither of the script nor of `accelerate launch`.")
        arguments.append(word)
    return arguments


def with_path(argv: Sequence[str], option: str, folder: str) -> list[str]:
    """
    A command line in which an option that names a YAML file, in either form, is two words.

    Args:
        argv (`Sequence[str]`):
            Arguments.
        option (`str`):
            The option.
        folder (`str`):
            Folder of the package with files that may be named.

    Returns:
        `list[str]`: Arguments, with the path of the file.

    Raises:
        `ValueError`: If no file is named, or there is none of this name.
    """
    words: list[str] = []
    for word in argv:
        words += [option, word.removeprefix(f"{option}=")] if word.startswith(f"{option}=") else [word]
    if words and words[-1] == option:
        raise ValueError(f"`{option}` names no file.")
    for place in range(1, len(words)):
        if words[place - 1] == option:
            words[place] = shipped(folder, words[place])
    return words
