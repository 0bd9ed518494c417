# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Argument classes of the scripts, and the parser of a script's arguments."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainerState
from trl import DatasetMixtureConfig, ScriptArguments

from ..paths import names_reward_model
from ..rewards.named import load_reward_funcs
from ..rollout.tools import load_tools
from ..spelling import recipe_names
from .option_table import options
from .options import launched_command_parser


T = TypeVar("T")


def option(default: T, text: str) -> T:
    """Returns a dataclass field with a default, and with the text that `--help` shows."""
    return field(default=default, metadata={"help": text})


@dataclass
class PromptArguments(ScriptArguments, DatasetMixtureConfig):
    r"""Arguments of scripts that read prompts from a dataset or a mixture ([`~trl.DatasetMixtureConfig`])."""

    prompt: str | None = option(
        None,
        "Template of the column `prompt`: `{name}` stands for the row's value in the column `name`, and "
        "`{{word}}` for the text `{word}`. Other braces stay.",
    )
    system_prompt: str | None = option(None, "System message at the start of every prompt.")


@dataclass
class RunArguments(PromptArguments):
    """Arguments of scripts that train."""

    disable_compact_log: bool = option(
        False, "Show transformers' progress bar and dictionaries of metrics instead of one line per log."
    )
    dry_run: bool = option(False, "Build everything, take one step and log it, and save nothing.")
    # Fields that aren't options: the options that the user set, the command of the run, and the trainer's state
    user_options: dict[str, Any] | None = field(default=None, init=False, repr=False)
    command: str = field(default="", init=False, repr=False)
    state: TrainerState | None = field(default=None, init=False, repr=False)


@dataclass
class RFTScriptArguments(PromptArguments):
    """Arguments of scripts that sample completions."""

    solution: str | None = option(None, "Template of the column `solution`, with fields as in `--prompt`.")
    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: names in `trl_multimodal_rft.rewards` or TRL, dotted paths, or reward models by folder. "
        'Settings go in brackets: `"box_iou_reward(iou_threshold=0.5)"`. Without a reward model, the default is '
        "`accuracy_reward` and `format_reward`, whose tags prompts must request; `--benchmark` and `--pairs` "
        "have other defaults.",
    )
    reward_recipe: dict | None = option(
        None,
        "In place of `reward_funcs`: weights of reward functions by the label of a row, in JSON: "
        '`{"counting": {"counting_reward": 1.0}}`.',
    )
    reward_label_column: str = option("task", "Column with the label of each row, for `reward_recipe`.")
    reward_model_name_or_path: str | None = option(
        None,
        "Sequence classifier, on the Hub or in a folder, whose score is the first reward. With `evaluate --pairs`, "
        "the reward model to measure.",
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.reward_funcs, str):  # a config file can name one function as a string
            self.reward_funcs = [self.reward_funcs]
        if self.reward_funcs is not None and self.reward_recipe is not None:
            raise ValueError("`reward_recipe` names the reward functions, too; remove `reward_funcs`.")

    def load_rewards(self, default_names: Sequence[str], takes_models: bool = False) -> list[Any]:
        """
        Loads the reward functions of `reward_recipe` or `reward_funcs`. Without both, loads `default_names`. Names of
        reward models stay, for a trainer to load.
        """
        if self.reward_recipe is not None:
            return load_reward_recipe(self.reward_recipe, self.reward_label_column)
        names = default_names if self.reward_funcs is None else self.reward_funcs
        functions = load_reward_funcs([name for name in names if not names_reward_model(name)])
        if len(functions) < len(names) and not takes_models:
            raise ValueError(
                "`--reward_funcs` names a reward model, whose scores don't tell whether an answer is correct; name "
                "functions alone."
            )
        remaining = iter(functions)
        return [name if names_reward_model(name) else next(remaining) for name in names]


@dataclass
class ToolArguments:
    """Tools of scripts that sample completions in several turns."""

    tools: list[str] | None = option(
        None,
        'Tools that the model may call: `zoom`, `"zoom(scale=1000)"`, or dotted paths of functions and of '
        "an environment class.",
    )

    def tool_inputs(self) -> dict[str, Any]:
        """Loads tools as keyword arguments of a trainer or evaluation. A config file can name one tool as a string."""
        return load_tools([self.tools] if isinstance(self.tools, str) else self.tools or [])


@dataclass
class RLScriptArguments(RunArguments, ToolArguments, RFTScriptArguments):
    """Arguments of scripts that train with rewards and tools."""

    chat_template_path: str | None = option(
        None,
        "Chat template in place of the model's: a Jinja file, or the name or folder of a model that has the "
        "template. Models such as Qwen2.5-VL need one for tools, because their template has no turns of tools.",
    )


@dataclass
class DistillationScriptArguments(RunArguments, ToolArguments):
    """Arguments of distillation."""


@dataclass
class SFTScriptArguments(RunArguments):
    """Arguments of supervised training."""

    completion: str | None = option(None, "Template of the column `completion`, with fields as in `--prompt`.")


@dataclass
class PPOScriptArguments(RunArguments, RFTScriptArguments):
    """Arguments of PPO."""

    value_model_name_or_path: str | None = option(
        None,
        "Critic: a saved critic, a reward model or a backbone of the policy's family. By default a copy "
        "of the policy; with `shared_trunk`, a value head on the policy.",
    )
    ptx_dataset_name: str | None = option(
        None, "Path or name of the dataset for the supervised loss, whose weight is `ptx_coef`."
    )
    ptx_dataset_config: str | None = option(None, "Configuration of the dataset `ptx_dataset_name`.")
    ptx_dataset_split: str = option("train", "Split of the dataset `ptx_dataset_name`.")


def load_reward_recipe(recipe: dict[str, dict[str, float]], label_column: str) -> list[Callable]:
    """
    Loads the reward functions of a recipe, `{label: {name: weight}}`, see [`~rewards.ready.recipe.apply_recipe`].

    Raises `ValueError` if the recipe has another form.
    """
    from ..rewards.ready.recipe import apply_recipe

    names = recipe_names(recipe)
    functions = dict(zip(names, load_reward_funcs(names), strict=True))
    # (kind, name, weight) of each reward, as `apply_recipe` expects
    table = {label: [("named", name, weight) for name, weight in weights.items()] for label, weights in recipe.items()}
    return apply_recipe(functions, table, label_column)


def parse(
    arguments: Sequence[type], argv: Sequence[str] | None = None, demo: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """
    Parses a command line into one instance per class in `arguments`. `demo` holds options that apply if the command
    line names no model.
    """
    argv = sys.argv[1:] if argv is None else argv
    parsed = vars(launched_command_parser(Path(sys.argv[0]).name, options(arguments)).parse_with_config(argv))
    values = {**demo, **parsed} if demo is not None and "model_name_or_path" not in parsed else parsed
    instances = tuple(
        cls(**{spec.name: values[spec.name] for spec in fields(cls) if spec.init and spec.name in values})
        for cls in arguments
    )
    if isinstance(instances[0], RunArguments):
        instances[0].user_options = parsed
    return instances
