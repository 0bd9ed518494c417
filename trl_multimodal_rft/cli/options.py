# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Parsers of the commands. This module doesn't import the commands' code, so that `--help` is quick."""

import argparse
import difflib
import functools
import importlib.resources
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from ..paths import local_path
from ..spelling import check_interval, did_you_mean, interval_words, read_json
from .errors import one_line
from .words import in_shell


# Titles of groups of options, in the order of `--help`
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
# Options in the first block of `--help`: an example, a README, `first_run.md` or a tenth of the recipes sets them
FIRST_OPTIONS = ("model_name_or_path", "teacher_model_name_or_path", "value_model_name_or_path", "dtype", "freeze")
FIRST_OPTIONS += ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "dataset_name", "media_dir", "prompt")
FIRST_OPTIONS += ("min_pixels", "max_pixels", "benchmark", "group_by", "reward_funcs", "reward_weights", "output_dir")
FIRST_OPTIONS += ("dry_run", "batch_size", "num_processes", "max_steps", "num_train_epochs")
FIRST_OPTIONS += ("per_device_train_batch_size", "logging_steps", "save_steps", "gradient_accumulation_steps")
FIRST_OPTIONS += ("steps_per_generation", "num_generations", "num_samples", "pass_at", "max_completion_length")
FIRST_OPTIONS += ("temperature", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length")
FIRST_OPTIONS += ("max_tool_calling_iterations", "packing", "max_tokens_per_microbatch", "gradient_checkpointing")
FIRST_OPTIONS += ("learning_rate", "value_learning_rate", "max_context_media", "freezing_actor_steps")
FIRST_OPTIONS += ("lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "beta", "entropy_coef")
FIRST_OPTIONS += ("epsilon", "epsilon_high", "delta", "loss_type", "dynamic_sampling", "vllm_enable_sleep_mode")
# Options that name a model or a dataset, and options that name another folder or file
NAME_OPTIONS = ("model_name_or_path", "reward_model_name_or_path", "value_model_name_or_path", "base")
NAME_OPTIONS += ("dataset_name", "ptx_dataset_name")
_PATHS = ("output_dir", "compare_with")
TRACEBACK = "traceback"  # destination of `--debug`
_LAUNCH_PREFIX = "launch "  # prefix of `dest` for options of `accelerate launch`
_OPTION_WORD = re.compile(r"^--([\w-]+)(?==|\Z)")
_NEGATIVE = re.compile(r"^-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)
_HELP = {"-h", "--help", "--help-all", "--help_all"}
_MAX_LISTED = 8  # maximum number of choices that `--help` shows beside the option


# Limits on the values of a config file, with those that aliases repeat
_MOST_NODES = 100_000
_DEEPEST = 100

Value = bool | int | float | str | list | dict | None


def read_config(path: str) -> dict[str, Value]:
    """Returns a config file's values by option. Null is `None`. Other scalars are strings, as on a command line."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}: it has no keys; write lines such as `max_steps: 100`.")
        names = [_option_name(key.value) for key, _ in node.value]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"{path}: `{duplicate}` is set twice; remove one.")
        _check_nodes(node, path)
        loader.flatten_mapping(node)
        # The value of a node, and its source in the file: a text for a scalar, nodes for a list or mapping
        values_and_sources = {
            _option_name(key.value): (loader.construct_object(value, deep=True), value.value)
            for key, value in node.value
        }
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: it isn't YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply; write it flat.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it isn't text in UTF-8; name a YAML file.") from error
    return {
        name: source if value is not None and isinstance(source, str) else value
        for name, (value, source) in values_and_sources.items()
    }


def _check_nodes(root: Any, path: str) -> None:
    """Raises a `ValueError` about a key that is set twice in a mapping, and about aliases that make endless values."""
    stack = [(root, 0)]
    n_nodes = 0
    while stack:
        node, depth = stack.pop()
        n_nodes += 1
        if n_nodes > _MOST_NODES or depth > _DEEPEST:
            raise ValueError(f"{path}: its aliases (`*name`) repeat values without end; write the values themselves.")
        if isinstance(node.value, str):  # a scalar
            continue
        pairs = [item if isinstance(item, tuple) else (None, item) for item in node.value]
        keys = [key.value for key, _ in pairs if key is not None and isinstance(key.value, str)]
        duplicate, n = next(iter(Counter(keys).most_common(1)), (None, 0))
        if n > 1:
            raise ValueError(f"{path}: `{duplicate}` is set twice in one mapping; remove one.")
        stack += [(value, depth + 1) for _, value in pairs]


def _option_name(key: str) -> str:
    return str(key).replace("-", "_")


def config_path(folder: str, name: str) -> str:
    """Returns `name` if it is a file's path, or else the path of the YAML file `name` in a folder of this package."""
    if Path(name).is_file():
        return name
    root = Path(str(importlib.resources.files("trl_multimodal_rft").joinpath(folder)))
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    if name not in files:
        # Names with a folder, such as "qwen2_vl_2b/refcoco_grpo", are also compared without it
        stem = Path(name).stem
        stems = [Path(file).name for file in files]
        hint = did_you_mean(name, files)
        near_stems = difflib.get_close_matches(stem, stems, 1, cutoff=1.0 if hint else 0.8)
        near = [f"`{file}`" for file in files if Path(file).name in near_stems]
        if not near and not hint:
            local_path(name)  # raises for names that look like paths
        hint = f" Did you mean {' or '.join(near)}?" if near else hint or f" This package has {', '.join(files)}."
        raise ValueError(f"There is no file {name!r}.{hint}")
    return str(files[name])


class Parser(argparse.ArgumentParser):
    """Parser of a command. Its errors are one line, and `--config` reads options from a file."""

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        usage: str | None = None,
        epilog: str | None = None,
        *,
        add_help: bool = True,
    ):
        formatter = functools.partial(_HelpFormatter, max_help_position=32)
        texts = {"prog": prog, "usage": usage, "description": description, "epilog": epilog, "add_help": add_help}
        super().__init__(**texts, allow_abbrev=False, formatter_class=formatter)
        self._negative_number_matcher = _NEGATIVE  # argparse takes `-1e-5` for an option
        self.options: list[dict[str, Any]] = []  # options of a launched command
        self.nullable: set[str] = set()  # options that accept null in a config file
        self.error_prefix = ""  # start of error messages while a config file is read

    def error(self, message: str) -> NoReturn:
        text = in_shell(one_line(message), self.option_names())
        self.exit(2, f"{self.prog}: error: {self.error_prefix}{text}\n")

    def option_names(self) -> list[str]:
        return [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]

    def _check_value(self, action: argparse.Action, value: Value) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}.{near}" if near else error.message) from None

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """
        Parses a command line. Names of options can have dashes in place of underscores. Unknown options are reported
        first, before missing required options.
        """
        words = [_OPTION_WORD.sub(lambda name: f"--{name[1].replace('-', '_')}", word) for word in args or ()]
        for name in (word.split("=")[0] for word in words if word.startswith("--")):
            if name not in self._option_string_actions:
                names = self.option_names()
                near = did_you_mean(name[2:], names)
                of_runs = {option["name"] for option in table()["options"]}
                if "config" in names and not self.options and name[2:] in of_runs:
                    near = " It is an option of a run: `--config` reads the file of the run with it."
                self.error(f"there is no option `{name}`.{near}")
        return super().parse_args(words, namespace or argparse.Namespace())

    def add_options(self, command: str, *names: str, **defaults: Value) -> None:
        """Adds options of a launched command: those in `names`, and those in `defaults` with a new default."""
        options = {option["name"]: option for option in options_of(command)}
        trainer_group = self.add_argument_group("as in the config of a trainer")
        for name in (*names, *defaults):
            default = defaults.get(name, options[name]["default"])
            _add_option(
                self if name in FIRST_OPTIONS else trainer_group, {**options[name], "default": default}, default
            )

    def parse_with_config(
        self, argv: Sequence[str], convert_run_config: Callable[[dict[str, Value]], dict[str, Value]] | None = None
    ) -> argparse.Namespace:
        """
        Parses a command line, and the file or built-in recipe of its `--config`. The command line takes precedence.
        `convert_run_config` is for commands that also take the config of a training run. It converts the config's
        entries to options of the command, and other entries are dropped.
        """
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        finder.error = self.error  # type: ignore[method-assign]
        name = finder.parse_known_args(argv)[0].config
        namespace = argparse.Namespace()
        if name is not None and not _HELP & {word.partition("=")[0] for word in argv}:
            path = config_path("recipes", name)
            entries = read_config(path)
            if convert_run_config is not None:
                entries = {
                    key: value
                    for key, value in convert_run_config(entries).items()
                    if f"--{key}" in self._option_string_actions
                }
            else:
                env = entries.pop("env", None)
                if isinstance(env, dict):
                    os.environ.update({name: str(value) for name, value in env.items()})
                    namespace.env = env
            self.error_prefix = f"{path}: "
            self._parse_entries(entries, namespace)
            self.error_prefix = ""
        parsed = self.parse_args(argv, namespace)
        launch = {name: value for name, value in vars(parsed).items() if name.startswith(_LAUNCH_PREFIX)}
        for name in launch:
            delattr(parsed, name)
        if launch:
            parsed.launch = {name.removeprefix(_LAUNCH_PREFIX): value for name, value in launch.items()}
        for option in (*NAME_OPTIONS, *_PATHS):
            if (getattr(parsed, option, None) or "").startswith("~"):
                setattr(parsed, option, os.path.expanduser(getattr(parsed, option)))
        return parsed

    def _parse_entries(self, entries: dict[str, Value], namespace: argparse.Namespace) -> None:
        """The command line must set the required options that the file doesn't set."""
        words = []
        for name, value in entries.items():
            action = self._option_string_actions.get(f"--{name}")
            if value is None:  # null means the default for an option that can't be `None`
                if name in self.nullable:
                    setattr(namespace, name, None)
                continue
            if action is not None:
                action.required = False
            if action is not None and action.nargs == 0 and isinstance(value, str):  # a flag
                words += [f"--{name}"] if _parse_bool(value) else []
            elif isinstance(value, list) and action is not None and action.nargs == "+":
                words += [f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in value)]
            else:
                words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        # `parse_args` reads the file here, and the command line later
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        self.parse_args(words, namespace)
        for action in required:
            action.required = True


class _HelpFormatter(argparse.HelpFormatter):
    """Help formatter that adds the default to an option's help, see [`_with_default`]."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and _with_default(action.help, action.default)


class _Help(argparse.Action):
    """Action of `--help` and `--help WORD`: shows the options of examples and recipes, or those that match a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        if isinstance(parser, Parser):
            sys.stdout.write(_matching_options(parser, str(values)) if values else _first_options(parser))
        parser.exit()


def _summary(name: str, text: str, default: Value = None) -> str:
    width = shutil.get_terminal_size().columns - 37  # without an option's name in 35 columns, and a margin
    sentence = " ".join(text.split()).replace("`", "").partition(". ")[0].rstrip(".")
    words = " ".join(map(str, default)) if isinstance(default, list) else default
    stated = "" if default in (None, False, {}) or "efault" in sentence else f" ({words})"
    if width < 35:  # a narrow terminal, whose lines hold either the name or the text
        return f"  {name}\n      {textwrap.shorten(sentence + stated, width + 29, placeholder=' ...')}"
    return f"  {name:32} {textwrap.shorten(sentence + stated, width, placeholder=' ...')}"


def add_short_help(parser: Parser) -> None:
    """Adds `--help`, which has a line for each option, `--help WORD` and `--help_all`, which explain them."""
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="WORD", action=_ShortHelp, help=argparse.SUPPRESS)
    parser.add_argument("--help_all", action="help", help=argparse.SUPPRESS)


class _ShortHelp(argparse.Action):
    """Action of `--help` and `--help WORD` of a command that isn't launched."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        shown: dict[str, list[argparse.Action]] = {}
        for group in parser._action_groups:
            actions = shown.setdefault(str(group.title), [])
            actions += [action for action in group._group_actions if _is_shown(action)]
        if values:
            self._explain(parser, shown, str(values))
        else:
            lines = [f"usage: {parser.usage}", "", str(parser.description)]
            for title, actions in shown.items():
                lines += ["", f"{title}:"] if actions else []
                # Those that must be given come first
                for action in sorted(actions, key=lambda action: not action.required):
                    lines.append(_summary(action.option_strings[0], str(action.help), action.default))
            words = "`--help WORD` explains options, such as `--help tokens`; `--help_all` explains all."
            sys.stdout.write("\n".join([*lines, "", words, ""]))
        parser.exit()

    def _explain(self, parser: argparse.ArgumentParser, shown: dict[str, list[argparse.Action]], word: str) -> None:
        word = _option_name(word.lstrip("-").lower())
        actions = [*itertools.chain.from_iterable(shown.values())]
        matches = [action for action in actions if word in action.dest]
        matches = matches or [action for action in actions if word in str(action.help).lower()]
        if not matches:
            parser.error(f"no option has {word!r} in its name or help.{did_you_mean(word, [a.dest for a in actions])}")
        formatter = parser._get_formatter()
        formatter.add_arguments(matches)
        sys.stdout.write(formatter.format_help())


def _is_shown(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.help is not argparse.SUPPRESS


def _first_options(parser: Parser) -> str:
    lines = [f"usage: {parser.usage}", *(["", parser.description] if parser.description else [])]
    n_first = 0
    for group, title in GROUPS.items():
        rows = [option for option in parser.options if option["group"] == group and option["name"] in FIRST_OPTIONS]
        lines += ["", f"{title}:"] if rows else []
        n_first += len(rows)
        lines += [_summary(f"--{option['name']}", option["help"], option["default"]) for option in rows]
    n_others = len(parser.options) - n_first
    lines += ["", f"`--help WORD` explains options, such as `--help lora`; `--help_all` shows {n_others} more."]
    return "\n".join(
        [*lines, "`--config FILE` reads options from a file or a recipe; `--no_NAME` turns off the option NAME.", ""]
    )


def _matching_options(parser: Parser, word: str) -> str:
    """Returns the help of the options that have a word in their names, or else in their descriptions."""
    word = word.lstrip("-").lower()
    options = [option for option in parser.options if _option_name(word) in option["name"].lower()]
    options = options or [option for option in parser.options if word in option["help"].lower()]
    if not options:
        parser.error(
            f"no option has {word!r} in its name or help."
            f"{did_you_mean(word, [option['name'] for option in parser.options])}"
        )
    help_parser = Parser(parser.prog, usage=argparse.SUPPRESS, add_help=False)
    for option in options:
        _add_option(help_parser, option)
    return help_parser.format_help()


def _with_default(text: str, default: Value | tuple[str, ...]) -> str:
    """Leaves out a default that is trivial, or that the text states."""
    if default in (None, False, argparse.SUPPRESS) or default in ([], (), {}) or "efault" in text:
        return text
    default_text = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return f"{text} (default: {default_text.replace('%', '%%')})"


@functools.cache
def table() -> dict[str, Any]:
    """Returns the options of the launched commands for the installed versions of TRL, transformers and accelerate."""
    file = importlib.resources.files(__package__ or "").joinpath("options.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    if saved["versions"] == {name: version(name) for name in saved["versions"]}:
        return saved
    from .option_table import collect_options  # imports TRL and transformers, which takes seconds

    return json.loads(json.dumps(collect_options()))


def options_of(command: str) -> list[dict[str, Any]]:
    return [option for option in table()["options"] if command in option["commands"]]


def launched_command_parser(prog: str, options: Iterable[dict[str, Any]], description: str | None = None) -> Parser:
    """Returns the parser of a launched command, or of a script that is run as a file."""
    epilog = (
        "The first options are those of the examples and recipes. The file of `--config` takes the same options as "
        "the command line. `--no_NAME` turns off the option NAME."
    )
    parser = Parser(prog, description, f"{prog} [--config CONFIG] [options]", epilog, add_help=False)
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("-h", "--help", nargs="?", const="", metavar="WORD", action=_Help, help="show options, or options with WORD")
    add("--help_all", action="help", help="show all options and exit")
    add("--config", help="YAML file with options, or name of a recipe; the command line takes precedence")
    add("--accelerate_config", help="built-in config (cpu, single_gpu, multi_gpu, fsdp2, ...) or a file")
    options = [*options, *(row for row in table()["options"] if row["group"] == "launch")]
    add("--debug", action="store_true", dest=TRACEBACK, help="show the traceback of an error")
    # `accelerate launch` is the last group, so the command's options win over its options with the same name
    by_name: dict[str, dict[str, Any]] = {}
    for option in sorted(options, key=lambda option: [*GROUPS].index(option["group"])):
        by_name.setdefault(option["name"], option)
    by_name.pop("debug", None)  # transformers' `debug` isn't the `--debug` above
    parser.options = [*by_name.values()]
    first_options = [by_name.pop(name) for name in FIRST_OPTIONS if name in by_name]
    # The first options have no title, and each group's remaining options have the group's title
    sections = {
        "": first_options,
        **{group: [row for row in by_name.values() if row["group"] == group] for group in GROUPS},
    }
    for group, rows in sections.items():
        section = parser.add_argument_group(GROUPS[group]) if group else parser
        for option in rows:
            _add_option(section, option)
            if option["optional"]:
                parser.nullable.add(option["name"])
    return parser


def _add_option(group: argparse._ActionsContainer, option: dict[str, Any], default: Value = argparse.SUPPRESS) -> None:
    name = option["name"]
    type_name = option["type"]
    choices = option["choices"]
    arguments: dict[str, Any] = {"nargs": option["nargs"], "default": default}
    text = _with_default(" ".join(option["help"].split()).replace("%", "%%"), option["default"])
    if choices is None:
        arguments["metavar"] = "TEXT" if type_name == "str" else type_name.upper()
    elif len(choices) > _MAX_LISTED:
        arguments["metavar"] = "NAME"
        text += f" One of {', '.join(choices)}."
    convert: Callable[[str], Value] = {"int": int, "float": float, "bool": _parse_bool, "json": parse_json}.get(
        type_name, str
    )
    interval = option.get("interval")
    if interval is not None:
        text += f" Must be {interval_words(interval)}."
        convert = _within(convert, interval, option["remedy"])
    if option["optional"] and type_name != "str":
        convert = _or_none(convert)
    is_launch = option["group"] == "launch"
    if is_launch:
        arguments["dest"] = f"{_LAUNCH_PREFIX}{name}"
    if is_launch and type_name == "bool":
        group.add_argument(f"--{name}", dest=arguments["dest"], action="store_true", default=default, help=text)
        return
    if type_name == "bool":  # `--name` alone means true, as does `--name true`
        arguments |= {"nargs": "?", "const": True}
        if option["default"] is True:
            off_arguments = {"dest": name, "default": default, "help": argparse.SUPPRESS}
            group.add_argument(f"--no_{name}", action="store_false", **off_arguments)
    group.add_argument(f"--{name}", type=convert, choices=choices, help=text, **arguments)


def _parse_bool(text: str) -> bool:
    values = dict.fromkeys(("yes", "true", "t", "y", "1", "on"), True)
    values |= dict.fromkeys(("no", "false", "f", "n", "0", "off"), False)
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def parse_json(text: str) -> Value:
    """Reads JSON on a command line, see [`~spelling.read_json`]."""
    try:
        return read_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid json value: {text!r} ({error})") from None


# Messages of argparse show these names
_parse_bool.__name__ = "bool"
parse_json.__name__ = "json"


def _within(convert: Callable[[str], Value], interval: str, remedy: str) -> Callable[[str], Value]:
    """Returns a converter that refuses numbers outside of an interval."""

    def read(text: str) -> Value:
        value = convert(text)
        if isinstance(value, (int, float)):
            try:
                check_interval("it", value, interval, remedy)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return value

    read.__name__ = convert.__name__
    return read


def _or_none(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """Returns a converter that also reads `none` and `null`, as TRL does."""

    def read(text: str) -> Value:
        return None if text.lower() in ("none", "null") else convert(text)

    read.__name__ = convert.__name__
    return read
