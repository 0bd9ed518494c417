# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command line `trl-multimodal-rft`. Each command has a module, which is imported when the command runs."""

import importlib
import os
import signal
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import nullcontext

from ..lazy import uncollected_imports
from ..spelling import did_you_mean
from ..versions import check_versions, unfit_packages
from . import parsers
from .errors import input_error
from .foreign import hide_lines
from .options import Parser, add_short_help, launched_command_parser, options_of
from .preflight import check_names
from .registry import COMMANDS, LAUNCHED, command_module
from .words import in_shell, translated_logs


_PROG = "trl-multimodal-rft"
_MANY_OPTIONS = ("check", "estimate")  # commands whose `--help` is short, as that of launched commands

__all__ = ["COMMANDS", "LAUNCHED", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """
    Runs a command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Name of the command and its arguments. Defaults to the arguments of the process.
    """
    imports = uncollected_imports() if argv is None else nullcontext()
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else None
    if name not in COMMANDS:
        _exit_without_command(argv)
    try:
        hide_lines()
        check_versions()
        from ..progress import announce

        if name == "compare" and any(word.startswith("--plain") for word in argv):
            with imports:
                plain = command_module("plain")
            return plain.run(argv[1:])  # most of its options are those of a training run
        parser = _parser(str(name))
        args = parser.parse_with_config(argv[1:], getattr(parsers, f"options_for_{name}", None))
        announce("loading libraries")
        if name in LAUNCHED:
            importlib.import_module(".launch", __name__).run(name, args, argv[1:])
        else:
            check_names(args)
            with translated_logs(parser.option_names()):
                with imports:
                    command = command_module(str(name))
                try:
                    command.run(args)
                finally:
                    sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        try:
            print(flush=True)  # fails only if standard output is the broken pipe, as with `| head`
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
            sys.exit(128 + signal.SIGPIPE)
        raise
    except Exception as error:
        message = input_error(error)
        if message is not None and unfit_packages(error) is None:  # else options can't be read, either
            message = in_shell(message, _parser(str(name)).option_names())
        if message is None or "--debug" in argv:
            raise
        print(f"{_PROG} {name}: error: {message}", file=sys.stderr)
        sys.exit(1)


def _parser(name: str) -> Parser:
    prog = f"{_PROG} {name}"
    description = COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."
    if name in LAUNCHED:
        return launched_command_parser(prog, options_of(name), description)
    usage = f"{prog} [--config CONFIG] [options]"
    parser = Parser(prog, description, usage, add_help=False) if name in _MANY_OPTIONS else Parser(prog, description)
    if name in _MANY_OPTIONS:
        add_short_help(parser)
    getattr(parsers, name, lambda parser: None)(parser)  # `families` has no options
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _exit_without_command(argv: list[str]) -> None:
    width = max(map(len, COMMANDS))
    epilog = "commands:\n" + "\n".join(f"  {command:{width}}  {purpose}" for command, purpose in COMMANDS.items())
    parser = Parser(_PROG, epilog=epilog)
    parser.formatter_class = RawDescriptionHelpFormatter
    version = importlib.import_module(__name__.partition(".")[0]).__version__
    parser.add_argument("--version", action="version", version=f"{_PROG} {version}")
    parser.add_argument("command", metavar="command", help="its own `--help` lists its options")
    name = parser.parse_args(argv[:1]).command  # the other words are options of a command
    parser.error(f"there is no command {name!r}; `--help` lists the commands.{did_you_mean(name, COMMANDS)}")
