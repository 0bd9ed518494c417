# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft grpo` and its like: a script of this package, by `accelerate launch`."""

import importlib
from collections.abc import Sequence

from accelerate.commands.launch import launch_command, launch_command_parser
from trl import TrlParser

from ..scripts.launching import split_arguments


_EPILOG = (
    "`--config recipe.yaml` reads any of these from a file, or from a recipe of this package by its name; the command "
    "line wins over it. `--accelerate_config` names a config of this package (cpu, single_gpu, multi_gpu, fsdp2, ...) "
    "or a file. All arguments of `accelerate launch`, such as `--num_processes 4`, are taken, too, also from the file."
)


def run(name: str, argv: Sequence[str]) -> None:
    """
    Launches a script.

    Args:
        name (`str`):
            Name of the command and of the script.
        argv (`Sequence[str]`):
            Arguments of the script and of `accelerate launch`.

    Raises:
        `ValueError`: If an argument is neither's.
    """
    script = importlib.import_module(f"..scripts.{name}", __package__)
    parser = TrlParser(script.ARGUMENTS, prog=f"trl-multimodal-rft {name}", epilog=_EPILOG)
    launcher, arguments = split_arguments(parser, argv)
    launch_command(launch_command_parser().parse_args([*launcher, "--module", script.__name__, *arguments]))
