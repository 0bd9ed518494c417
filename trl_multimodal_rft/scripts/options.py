# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Parsers of the commands, without importing what the commands run."""

import argparse
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from ..spelling import did_you_mean
from .errors import one_line


# Titles of groups in `--help`, in its order
GROUPS = {
    "script": "data, prompts and rewards",
    "mixture": "several datasets",
    "evaluation": "evaluation",
    "model": "model",
    "multimodal": "trainer, by trl-multimodal-rft",
    "trl": "trainer, by TRL",
    "transformers": "transformers.TrainingArguments",
    "launch": "accelerate launch",
}
_ONLY_IN_FULL_HELP = ("transformers", "launch")
# Options that name a model, a dataset or a folder
NAMES = ("model_name_or_path", "reward_model_name_or_path", "value_model_name_or_path", "base")
NAMES += ("dataset_name", "ptx_dataset_name")
_LAUNCH = "launch "  # start of destinations of options of `accelerate launch`
_DASHED = re.compile(r"^--([\w-]+)(?==|\Z)")
_LISTED = 8  # choices that `--help` lists before the description
# Values of options, by the name of their type
_KINDS = {"int": "an integer, such as 8", "float": "a number, such as 1e-5", "bool": "`true` or `false`"}


Value = bool | int | float | str | list | dict | None


class Key(NamedTuple):
    """The value of a key in a config file, as YAML and as text."""

    value: Value
    text: str | list | dict
    file: str


def read_config(path: str) -> dict[str, Key]:
    """Reads the keys of a config file."""
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}: it has no keys; write lines such as `max_steps: 100`.")
        names = [key.value for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{path}: `{twice}` is set twice; remove one.")
        loader.flatten_mapping(node)
        texts = yaml.BaseLoader("")
        return {
            str(key.value): Key(
                loader.construct_object(value, deep=True), texts.construct_object(value, deep=True), path
            )
            for key, value in node.value
        }
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: it isn't YAML: {error.problem or error.context}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it isn't text in UTF-8; name a YAML file.") from error


def shipped(folder: str, name: str) -> str:
    """The path of a YAML file, or of one in a folder of this package by its name."""
    if Path(name).is_file():
        return name
    root = Path(str(importlib.resources.files("trl_multimodal_rft").joinpath(folder)))
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    if name not in files:
        near = did_you_mean(name, files) or f" This package has {', '.join(files)}."
        raise ValueError(f"There is no file {name!r}.{near}")
    return str(files[name])


class Parser(argparse.ArgumentParser):
    """Parser of a command: errors are one line with the closest option, and `--config` reads options from a file."""

    def __init__(self, prog: str, description: str | None = None, usage: str | None = None, epilog: str | None = None):
        formatter = functools.partial(_HelpFormatter, max_help_position=32)
        super().__init__(prog, usage, description, epilog, allow_abbrev=False, formatter_class=formatter)
        self.optional: set[str] = set()  # options that may be null in a config file

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """
        Parses a command line. Unknown options end the process before missing ones do. Names of options may have dashes
        in place of underscores.
        """
        words = [_DASHED.sub(lambda name: f"--{name[1].replace('-', '_')}", word) for word in args or ()]
        required = [action for action in self._actions if action.required and action.option_strings]
        for action in required:
            action.required = False
        parsed, rest = self.parse_known_args(words, namespace or argparse.Namespace())
        for word in rest:
            if word.startswith("--"):
                self.error(f"there is no option `{word.split('=')[0]}`." + self._near(word.split("=")[0][2:]))
        if rest:
            self.error(f"{rest[0]!r} belongs to no option.")
        missing = [f"`{action.option_strings[0]}`" for action in required if getattr(parsed, action.dest) is None]
        if missing:
            self.error(f"{' and '.join(missing)} must be set.")
        return parsed

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(each) for each in action.choices]
            near = did_you_mean(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(names)}.{near}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> str | float | bool | list | dict | None:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kind = _KINDS.get(getattr(action.type, "__name__", ""))
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {kind}.") if kind else error from None

    def _near(self, name: str) -> str:
        names = [each[2:] for action in self._actions for each in action.option_strings if each.startswith("--")]
        return did_you_mean(name, names).replace("mean `", "mean `--")

    def add_options(self, command: str, *names: str, **defaults: Value) -> None:
        """Adds options of a launched command, with their defaults or others."""
        options = {option["name"]: option for option in options_of(command)}
        for name in (*names, *defaults):
            default = defaults.get(name, options[name]["default"])
            _add_option(self, {**options[name], "default": default}, default)

    def parse_with_config(
        self, argv: Sequence[str], of_run: Callable[[dict[str, Key]], dict[str, Key]] | None = None
    ) -> argparse.Namespace:
        """Parses a command line whose `--config` names a file or a recipe of this package. The command line wins."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        finder.error = self.error  # type: ignore[method-assign]
        name = finder.parse_known_args(argv)[0].config
        values = argparse.Namespace()
        if name is not None and not {"-h", "--help", "--help-all", "--help_all"} & {*argv}:
            keys = read_config(shipped("recipes", name))
            if of_run is None:
                if "env" in keys and isinstance(env := keys.pop("env").value, dict):
                    os.environ.update({name: str(value) for name, value in env.items()})
                    values.env = env
            else:
                keys = of_run(keys)
            self._set_values(keys, values, ignores_others=of_run is not None)
        parsed = self.parse_args(argv, values)
        launch = {name: value for name, value in vars(parsed).items() if name.startswith(_LAUNCH)}
        for name in launch:
            delattr(parsed, name)
        if launch:
            parsed.launch = {name.removeprefix(_LAUNCH): value for name, value in launch.items()}
        for option in NAMES:
            if (getattr(parsed, option, None) or "").startswith("~"):
                setattr(parsed, option, os.path.expanduser(getattr(parsed, option)))
        for option, value in vars(parsed).items():
            if any(isinstance(each, str) and "\0" in each for each in (value if isinstance(value, list) else [value])):
                raise ValueError(f"`{option}` has a NUL byte, which no path or name has; remove it.")
        return parsed

    def _set_values(self, keys: dict[str, Key], values: argparse.Namespace, ignores_others: bool) -> None:
        actions = {
            option[2:]: action
            for action in self._actions
            for option in action.option_strings
            if not isinstance(action, (argparse._HelpAction, argparse._StoreFalseAction))
        }
        for name, key in keys.items():
            action = actions.get(name)
            if action is None:
                if ignores_others:
                    continue
                raise ValueError(f"{key.file}: there is no option `{name}`.{did_you_mean(name, actions)}")
            if key.value is None and name not in self.optional:
                continue
            try:
                setattr(values, action.dest, self._read(action, key))
            except argparse.ArgumentError as error:
                raise ValueError(f"{key.file}: `{name}`: {error.message}") from error

    def _read(self, action: argparse.Action, key: Key) -> Value:
        """Value of an option in a config file, read like the command line."""
        kind, takes_several = getattr(action.type, "__name__", "str"), action.nargs in ("+", "*")
        if isinstance(key.value, bool) and action.nargs == "*":  # `--debug`
            return [] if key.value else None
        if isinstance(key.value, bool) and (action.nargs == 0 or kind == "bool"):
            return key.value
        is_json = kind in ("json", "loads") and not isinstance(key.value, str)
        if key.value is None or is_json or (kind == "str" and not isinstance(key.text, str) and not takes_several):
            return key.value
        words = key.text if takes_several and isinstance(key.text, list) else [key.text]
        words = [word if isinstance(word, str) else json.dumps(key.value) for word in words]
        if action.nargs == 0:
            return self._get_value(argparse.Action([], action.dest, type=_bool), words[0])
        return self._get_values(action, words)


class _Switch(argparse._StoreAction):
    """A switch that `--no_...` turns off."""


class _HelpFormatter(argparse.HelpFormatter):
    """Shows how switches are turned off, and no trivial defaults."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        return text.replace(" ", f", --no_{action.dest} ", 1) if isinstance(action, _Switch) else text

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and _with_default(action.help, action.default)


def _with_default(text: str, default: Value | tuple[str, ...]) -> str:
    if default in (None, False, argparse.SUPPRESS) or default in ([], (), {}) or "efault" in text:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return f"{text} (default: {shown.replace('%', '%%')})"


@functools.cache
def table() -> dict[str, Any]:
    """The options of the launched commands, by the installed versions of TRL, transformers and accelerate."""
    file = importlib.resources.files(__package__ or "").joinpath("options.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    if saved["versions"] == {name: version(name) for name in saved["versions"]}:
        return saved
    from .option_table import collect  # imports them, which takes seconds

    return json.loads(json.dumps(collect()))


def options_of(command: str) -> list[dict[str, Any]]:
    """Options of a launched command."""
    return [option for option in table()["options"] if command in option["commands"]]


def launched_parser(
    prog: str, options: Iterable[dict[str, Any]], description: str | None = None, *, shows_all: bool = False
) -> Parser:
    """Parser of a launched command."""
    epilog = (
        "`--help_all` shows the options of transformers.TrainingArguments, such as `--output_dir`, `--max_steps`, "
        "`--num_train_epochs`, `--eval_strategy`, `--save_steps` and `--report_to`, and those of `accelerate launch`, "
        "such as `--num_processes`. The command line and the file of `--config` take all of them."
    )
    parser = Parser(prog, description, f"{prog} [--config CONFIG] [options]", epilog)
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--help_all", action="help", help="show all options and exit")
    add("--config", help="YAML file with options or built-in recipe; the command line wins")
    add("--accelerate_config", help="built-in config (cpu, single_gpu, multi_gpu, fsdp2, ...) or a file")
    options = [*options, *(each for each in table()["options"] if each["group"] == "launch")]
    takes_values = any(option["name"] == "debug" for option in options)  # of transformers: underflow_overflow
    how: dict[str, Any] = {"nargs": "*", "metavar": "OPTION"} if takes_values else {"action": "store_true"}
    add("--debug", help="show the traceback of an error" + "; with values: transformers' option" * takes_values, **how)
    known = {"debug"}
    for group, title in GROUPS.items():
        rows = [option for option in options if option["group"] == group and option["name"] not in known]
        known.update(option["name"] for option in rows)
        section = parser.add_argument_group(title)
        for option in rows:
            is_shown = shows_all or group not in _ONLY_IN_FULL_HELP
            _add_option(section, option if is_shown else {**option, "help": None})
            if option["optional"]:
                parser.optional.add(option["name"])
    return parser


def _add_option(group: argparse._ActionsContainer, option: dict[str, Any], default: Value = argparse.SUPPRESS) -> None:
    name, kind, choices = option["name"], option["type"], option["choices"]
    arguments: dict[str, Any] = {"nargs": option["nargs"], "default": default}
    text = argparse.SUPPRESS
    if option["help"] is not None:
        text = _with_default(" ".join(option["help"].split()).replace("%", "%%"), option["default"])
    if choices is None:
        arguments["metavar"] = "TEXT" if kind == "str" else kind.upper()
    elif len(choices) > _LISTED:
        arguments["metavar"] = "NAME"
        text += f" One of {', '.join(choices)}." * (text != argparse.SUPPRESS)
    convert: Callable[[str], Value] = {"int": int, "float": float, "bool": _bool, "json": _json}.get(kind, str)
    if option["optional"] and kind != "str":
        convert = _or_none(convert)
    is_launch = option["group"] == "launch"
    if is_launch:
        arguments["dest"] = f"{_LAUNCH}{name}"
    if is_launch and kind == "bool":
        group.add_argument(f"--{name}", dest=arguments["dest"], action="store_true", default=default, help=text)
        return
    if kind == "bool":
        arguments |= {"nargs": "?", "const": True}
        if option["default"] is True:
            arguments["action"] = _Switch
            off = {"dest": name, "default": default, "help": argparse.SUPPRESS}
            group.add_argument(f"--no_{name}", action="store_false", **off)
    group.add_argument(f"--{name}", type=convert, choices=choices, help=text, **arguments)


def _bool(text: str) -> bool:
    """Reads a boolean, as [`~transformers.HfArgumentParser`] does."""
    values = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _json(text: str) -> Value:
    return json.loads(text)


_bool.__name__, _json.__name__ = "bool", "json"  # which messages of argparse show


def _or_none(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """Reads `none` and `null` as well, as TRL does."""

    def read(text: str) -> Value:
        return None if text.lower() in ("none", "null") else convert(text)

    read.__name__ = convert.__name__
    return read
