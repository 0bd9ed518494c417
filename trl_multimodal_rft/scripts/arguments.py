# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the scripts beside those of configs and of [`~trl.ModelConfig`], and how they are read."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trl import DatasetMixtureConfig, ScriptArguments

from .options import launched_parser


@dataclass
class PromptArguments(ScriptArguments, DatasetMixtureConfig):
    r"""
    Arguments of scripts that read a dataset of prompts, or several ([`~trl.DatasetMixtureConfig`]).

    Args:
        prompt (`str`, *optional*):
            Makes the column `prompt` of a dataset without one, or another in its place: a text in which `{column}` is
            what that column of the row holds. Other braces stay (`\boxed{}`), and `{{word}}` is `{word}`.
        system_prompt (`str`, *optional*):
            Text of the system message that every prompt begins with.
    """

    prompt: str | None = field(
        default=None,
        metadata={
            "help": "Makes the column `prompt`: a text in which `{column}` is what that column of the row holds. "
            "Other braces stay, and `{{word}}` is `{word}`."
        },
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "Text of the system message that every prompt begins with."}
    )


@dataclass
class RFTScriptArguments(PromptArguments):
    """
    Script arguments of what samples completions.

    Args:
        reward_funcs (`list[str]`, *optional*):
            Names of functions in `trl_multimodal_rft.rewards`, or dotted paths to others, also of modules in the
            working directory. If there is no reward model either, `accuracy_reward` and `format_reward`.
        reward_model_name_or_path (`str`, *optional*):
            A sequence classifier, on the Hub or in a folder, whose score is the first reward.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: names in `trl_multimodal_rft.rewards`, or dotted paths. By default, if there "
            "is no reward model either, `accuracy_reward` and `format_reward`."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A sequence classifier, on the Hub or in a folder, whose score is the first reward."},
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.reward_funcs, str):  # one, in a config file
            self.reward_funcs = [self.reward_funcs]


@dataclass
class SFTScriptArguments(PromptArguments):
    """
    Script arguments of supervised training.

    Args:
        completion (`str`, *optional*):
            Makes the column `completion` as `prompt` makes its own.
    """

    completion: str | None = field(
        default=None, metadata={"help": "Makes the column `completion`, as `prompt` makes its own."}
    )


@dataclass
class PPOScriptArguments(RFTScriptArguments):
    """
    Script arguments of PPO.

    Args:
        value_model_name_or_path (`str`, *optional*):
            Critic: a saved critic, a reward model or a backbone, of the policy's family, on the Hub or in a folder. If
            `None`, it is a copy of the policy, or a head on it with `shared_trunk`.
        ptx_dataset_name (`str`, *optional*):
            Path or name of the dataset for the supervised loss, with `ptx_coef`: columns `prompt` and `completion`, or
            `messages`, and media columns.
        ptx_dataset_config (`str`, *optional*):
            Configuration of that dataset.
        ptx_dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of that dataset.
    """

    value_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Critic: a saved critic, a reward model or a backbone, of the policy's family. By default a copy "
            "of the policy, or a head on it with `shared_trunk`."
        },
    )
    ptx_dataset_name: str | None = field(
        default=None, metadata={"help": "Path or name of the dataset for the supervised loss, with `ptx_coef`."}
    )
    ptx_dataset_config: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    ptx_dataset_split: str = field(default="train", metadata={"help": "Split of that dataset."})


def parse(arguments: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """
    Reads the arguments of a script, with those of its `--config`.

    Args:
        arguments (`Sequence[type]`):
            The script's dataclasses.
        argv (`Sequence[str]`, *optional*):
            Arguments, those of the process by default. Those of `accelerate launch` have no effect.

    Returns:
        `tuple`: The dataclasses with their values.

    Raises:
        `ValueError`: If a key of the config file isn't an option, or has no value of it.
        `SystemExit`: If an argument isn't one.
    """
    from .option_table import options  # which imports this module

    argv = sys.argv[1:] if argv is None else argv
    parsed = vars(launched_parser(Path(sys.argv[0]).name, options(arguments)).parse_with_config(argv))
    if isinstance(debug := parsed.get("debug"), list):
        parsed["debug"] = " ".join(debug)
    names = [[each.name for each in fields(cls) if each.init] for cls in arguments]
    values = [{name: parsed[name] for name in own if name in parsed} for own in names]
    return tuple(cls(**own) for cls, own in zip(arguments, values, strict=True))
