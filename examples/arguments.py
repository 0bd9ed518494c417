# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How the example scripts read their arguments: a demo's own, a config file's, and those of the command line."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

from trl import ScriptArguments, TrlParser


@dataclass
class PPOScriptArguments(ScriptArguments):
    """
    Script arguments of the PPO examples.

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


class DemoParser(TrlParser):
    """
    [`~trl.TrlParser`] of a script with a demo, which runs as long as nobody names a model.

    The demo's arguments stand in for the defaults, so that those of a config file and of the command line win over
    them. To a model by name, whether by `--model_name_or_path x`, by `--model_name_or_path=x` or in a config file,
    none of them applies.

    Args:
        dataclass_types (`Sequence[type]`):
            Dataclasses to parse, [`~trl.ModelConfig`] among them.
        demo_arguments (`dict`):
            Names and values of the demo's arguments.
    """

    def __init__(self, dataclass_types: Sequence[type], demo_arguments: dict[str, object]):
        super().__init__(dataclass_types)
        self._demo, self._file = demo_arguments, {}

    def set_defaults_with_config(self, **kwargs) -> list[str]:
        self._file = kwargs
        return super().set_defaults_with_config(**kwargs)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        parsed = super().parse_known_args(args, namespace)
        if parsed[0].model_name_or_path is None:
            super().set_defaults_with_config(**{**self._demo, **self._file})
            parsed = super().parse_known_args(args, namespace)
        return parsed
