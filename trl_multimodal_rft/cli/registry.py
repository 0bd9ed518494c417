# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The names and purposes of the commands, as `--help` prints them, and their modules."""

import importlib
from types import ModuleType


# Run by `accelerate launch`
LAUNCHED = {
    "grpo": "train a model with GRPO",
    "rloo": "train a model with RLOO",
    "ppo": "train a model and its critic with PPO",
    "distillation": "train a model to imitate a teacher on the model's own completions",
    "sft": "train a model on completions in a dataset, such as before GRPO or PPO",
    "dpo": "train a model to prefer one of two completions",
    "kto": "train a model on completions that are labelled as good or bad",
    "reward": "train a reward model on comparisons of two completions",
    "evaluate": "measure accuracy, pass@k and majority@k on a dataset or benchmark",
    "filter": "keep rows of medium difficulty, or rows whose answers need their audio, image or video",
}
COMMANDS = {
    **LAUNCHED,
    "chat": "web UI to compare a trained model with its base",
    "check": "find the rows of a dataset that would not train, and the lengths of the others",
    "compare": "train a few steps with TRL's trainer and with this one, and compare numbers, time and memory",
    "estimate": "estimate whether a training run fits into GPU memory, and what to change if not",
    "families": "list the models with vision or audio, and their family-specific rules",
    "prepare": "convert a published dataset, or one in another tool's layout, to a folder of rows",
}
# Modules of the commands outside of the core, in the package
OUTSIDE = {
    "chat": "extras.chat",
    "compare": "extras.compare",
    "estimate": "extras.estimate",
    "evaluate": "extras.evaluate",
    "filter": "extras.filter",
    "plain": "extras.compare_plain",  # `compare --plain`
    "prepare": "extras.prepare.command",
}


def command_module(name: str) -> ModuleType:
    """Imports the module of a command."""
    return importlib.import_module(f"..{OUTSIDE.get(name, f'cli.{name}')}", __package__)
