# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The table of the commands' options, made from the config classes."""

import argparse
import enum
import importlib
import json
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from typing import Any, get_args, get_type_hints

from accelerate.commands.launch import launch_command_parser
from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..rewards.named import REWARD_NAMES
from ..rollout.tools import TOOLS
from ..trainers.base.config_options import options_of
from .registry import LAUNCHED


# Arguments of `accelerate launch` that the command sets
_RESERVED = {"help", "quiet", "module", "no_python", "debug", "training_script", "training_script_args"}


def collect_options() -> dict[str, Any]:
    """Collects the options of all launched commands. An option that is equal for several commands is one row."""
    rows: dict[str, dict[str, Any]] = {}
    for script in LAUNCHED:
        for option in options(importlib.import_module(f"{__package__}.commands").script_of(script).ARGUMENTS):
            rows.setdefault(json.dumps(option), {**option, "commands": []})["commands"].append(script)
    return {
        "versions": {name: version(name) for name in ("accelerate", "transformers", "trl")},
        "rewards": [*REWARD_NAMES],
        "tools": [*TOOLS],
        "options": [*rows.values(), *_launch_options()],
    }


def options(classes: Sequence[type]) -> list[dict[str, Any]]:
    """Returns the options that [`~trl.TrlParser`] makes from the argument classes of a script."""
    hints = {}
    groups = {}
    checked = {}
    for cls in classes:
        hints |= get_type_hints(cls)
        checked |= options_of(cls)
        groups |= {spec.name: _group(cls, spec.name) for spec in fields(cls) if spec.init}
    actions = {}
    for action in TrlParser(classes)._actions:
        actions.setdefault(action.dest, action)  # the action of `--no_...` comes second
    rows = []
    for name, group in groups.items():
        row = _option(actions[name], group, type(None) in get_args(hints[name]))
        choices = checked[name].choices or ()
        if (
            row["type"] == "str"
            and row["choices"] is None
            and choices
            and all(isinstance(choice, str) for choice in choices)
        ):
            row["choices"] = [*choices]
        interval = checked[name].interval
        rows.append({**row, "interval": interval, "remedy": None if interval is None else checked[name].remedy})
    return rows


def _option(action: argparse.Action, group: str, optional: bool) -> dict[str, Any]:
    """`optional` says whether the value can be `None`."""
    type_name = getattr(action.type, "__name__", "str")
    type_name = "bool" if type_name in ("string_to_bool", "str_to_bool") else type_name
    type_name = "str" if action.choices is not None or type_name == "DebugOption" else type_name
    default = [] if action.default == () else action.default
    return {
        "name": action.dest,
        "group": group,
        "type": type_name if type_name in ("str", "int", "float", "bool") else "json",
        "nargs": action.nargs if action.nargs == "+" else None,
        "optional": optional,
        "default": default.value if isinstance(default, enum.Enum) else default,
        "choices": None if action.choices is None else [*action.choices],
        "help": (action.help or "").replace("%%", "%"),
    }


def _group(owner: type, name: str) -> str:
    """For a trainer's config, the group is the package of the most derived class that defines the field."""
    if issubclass(owner, TrainingArguments):
        definer = next(member for member in owner.__mro__ if name in vars(member).get("__annotations__", ()))
        package = definer.__module__.split(".")[0]
        return "multimodal" if package == "trl_multimodal_rft" else package
    if issubclass(owner, ScriptArguments):
        return "mixture" if name in {member.name for member in fields(DatasetMixtureConfig)} else "script"
    return "model" if owner is ModelConfig else "evaluation"


def _launch_options() -> list[dict[str, Any]]:
    rows = []
    for action in launch_command_parser()._actions:
        if action.dest in _RESERVED or not action.option_strings:
            continue
        name = next(flag[2:] for flag in action.option_strings if flag.startswith("--"))
        option = _option(action, "launch", False)
        type_name = option["type"] if option["type"] in ("int", "float") else "str"
        rows.append({**option, "name": name, "type": "bool" if action.nargs == 0 else type_name, "commands": []})
    return rows
