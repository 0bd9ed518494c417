# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scripts of the launched commands. A script is a module, or a trainer with its arguments."""

from dataclasses import dataclass
from types import ModuleType

from trl import ModelConfig

from .. import trainers
from ..trainers.base.configs import TrainerConfig
from .arguments import (
    DistillationScriptArguments,
    PPOScriptArguments,
    RLScriptArguments,
    RunArguments,
    SFTScriptArguments,
)
from .registry import command_module
from .training import run


@dataclass(frozen=True)
class Script:
    """Script that runs a trainer. `main` takes one instance of each class in `ARGUMENTS`."""

    name: str
    arguments: type
    prefix: str  # start of the names of the trainer and its config, which are imported on first use

    @property
    def ARGUMENTS(self) -> tuple[type, ...]:
        return self.arguments, getattr(trainers, f"{self.prefix}Config"), ModelConfig

    def main(self, script_args: RunArguments, training_args: TrainerConfig, model_args: ModelConfig) -> None:
        """Trains and saves a model."""
        run(self.name, getattr(trainers, f"{self.prefix}Trainer"), script_args, training_args, model_args)


grpo = Script("grpo", RLScriptArguments, "MultimodalGRPO")
rloo = Script("rloo", RLScriptArguments, "MultimodalRLOO")
ppo = Script("ppo", PPOScriptArguments, "MultimodalPPO")
distillation = Script("distillation", DistillationScriptArguments, "MultimodalDistillation")
sft = Script("sft", SFTScriptArguments, "MultimodalSFT")
dpo = Script("dpo", RunArguments, "MultimodalDPO")
kto = Script("kto", RunArguments, "MultimodalKTO")
reward = Script("reward", RunArguments, "MultimodalReward")

_SCRIPTS = {script.name: script for script in tuple(globals().values()) if isinstance(script, Script)}


def script_of(name: str) -> Script | ModuleType:
    return _SCRIPTS.get(name) or command_module(name)
