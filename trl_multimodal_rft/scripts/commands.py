# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What each launched command runs: a module, or a trainer with its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from trl import ModelConfig

from .. import trainers
from ..trainers.checkpoints import CheckpointMixin
from ..trainers.configs import TrainerConfig
from . import evaluate, filter, ppo
from .arguments import DistillationScriptArguments, RLScriptArguments, RunArguments, SFTScriptArguments
from .training import run


@dataclass(frozen=True)
class Script:
    """`main` takes an instance of each class in `ARGUMENTS`."""

    ARGUMENTS: tuple[type, ...]
    main: Callable[..., None]


def _script(name: str, arguments: type, config: type[TrainerConfig], trainer_class: type[CheckpointMixin]) -> Script:
    return Script((arguments, config, ModelConfig), partial(run, name, trainer_class))


grpo = _script("grpo", RLScriptArguments, trainers.MultimodalGRPOConfig, trainers.MultimodalGRPOTrainer)
rloo = _script("rloo", RLScriptArguments, trainers.MultimodalRLOOConfig, trainers.MultimodalRLOOTrainer)
sft = _script("sft", SFTScriptArguments, trainers.MultimodalSFTConfig, trainers.MultimodalSFTTrainer)
dpo = _script("dpo", RunArguments, trainers.MultimodalDPOConfig, trainers.MultimodalDPOTrainer)
reward = _script("reward", RunArguments, trainers.MultimodalRewardConfig, trainers.MultimodalRewardTrainer)
_pair = trainers.MultimodalDistillationConfig, trainers.MultimodalDistillationTrainer
distillation = _script("distillation", DistillationScriptArguments, *_pair)

SCRIPTS: dict[str, Script | ModuleType] = {"grpo": grpo, "rloo": rloo, "ppo": ppo, "distillation": distillation}
SCRIPTS |= {"sft": sft, "dpo": dpo, "reward": reward, "evaluate": evaluate, "filter": filter}
