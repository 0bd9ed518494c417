# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command `trl-multimodal-rft`: one module per command, imported when it runs."""

import argparse
import importlib
import sys
from collections.abc import Sequence


# Run by `accelerate launch`
LAUNCHED = {
    "grpo": "train a model with GRPO",
    "rloo": "train a model with RLOO",
    "ppo": "train a model with PPO, beside a critic",
    "sft": "train a model on answers, such as before GRPO or PPO",
    "evaluate": "accuracy, pass@k and votes of a model on a dataset or benchmark",
    "filter": "keep the rows of a dataset whose answers need their sound, image or video",
}
COMMANDS = {
    **LAUNCHED,
    "chat": "a page on which to ask a trained model, and its base beside it",
    "check": "which rows of a dataset would not train and why, and how long the others are",
    "estimate": "does a training run fit into the memory of its GPUs, and what to change if not",
    "families": "the models that see and hear, and what is particular to them",
    "prepare": "a published dataset, or one in another tool's layout, as a folder of rows to train on",
}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Runs a command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Name of the command and its arguments, those of the process by default.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv and argv[0] in COMMANDS else None
    epilog = "commands:\n" + "\n".join(f"  {command:10} {purpose}" for command, purpose in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="trl-multimodal-rft" if name is None else f"trl-multimodal-rft {name}",
        description=None if name is None else COMMANDS[name].capitalize() + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter if name else argparse.RawDescriptionHelpFormatter,
        epilog=None if name else epilog,
    )
    if name is None:
        parser.add_argument("command", choices=COMMANDS, metavar="command", help="its own `--help` lists its options")
        parser.parse_args(argv)
    try:
        if name in LAUNCHED:
            importlib.import_module(".launch", __name__).run(name, argv[1:])
        else:
            command = importlib.import_module(f".{name}", __name__)
            command.add_arguments(parser)
            words = argv[1:]
            if hasattr(command, "of_run"):
                words = importlib.import_module(".recipe", __name__).with_recipe(parser, words, command.of_run)
            command.run(parser.parse_args(words))
    except ValueError as error:
        parser.exit(1, f"{error}\n")
