# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainers that sample, checked before anything is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ...engines.samplers import Sampler
from ...rewards.named import as_reward_funcs
from ...rollout.environments import rows_for_environments
from .arguments import check_arguments
from .configs import SamplingConfig
from .dataset_checks import check_kept_columns, modalities, warn_of_unread_media
from .setup import check_launch, warn_of_excluded_tokens
from .signatures import Model, Processor


if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import RewardFunc


@dataclass(frozen=True)
class Inputs:
    """Arguments of a trainer's constructor, checked."""

    model: Model
    args: SamplingConfig
    processing_class: Processor | None
    reward_funcs: list[Any] | None
    datasets: dict[str, Any]  # `train_dataset` and `eval_dataset`, as they were passed
    for_trl: dict[str, Any]  # further arguments of TRL's constructor, with a dataset in any case
    reward_processing_classes: Processor | list[Processor | None] | None = None
    ref_model: PreTrainedModel | None = None
    tools: Sequence[Callable] | None = None
    environment_factory: Callable | dict[str, Callable] | None = None
    rollout_func: Callable[..., dict[str, Any]] | None = None
    sampler: Sampler | None = None

    @property
    def uses_tools(self) -> bool:
        """`True` if completions call tools of the user or of environments."""
        return bool(self.tools) or self.environment_factory is not None

    @property
    def makes_prompts(self) -> bool:
        """`True` if environments or the user's function make prompts, and the rows may have none."""
        return self.rollout_func is not None or self.environment_factory is not None


# Arguments that TRL's constructor doesn't get
_OWN = ("reward_processing_classes", "ref_model", "tools", "environment_factory", "rollout_func", "sampler")


def check_inputs(
    model: Model,
    reward_funcs: "RewardFunc | list[RewardFunc] | None",
    args: SamplingConfig,
    processing_class: Processor | None,
    knows_rows: bool = True,
    **kwargs: Any,
) -> Inputs:
    """
    Returns the arguments of a trainer's constructor. Raises an error if they don't fit each other or the launch. Media
    of the datasets are looked for if `knows_rows`, that is if the datasets hold the rows of the run.
    """
    check_arguments(reward_funcs, args=args, processing_class=processing_class, **kwargs)
    check_launch(args, model)
    warn_of_excluded_tokens(args)
    reward_funcs = None if reward_funcs is None else as_reward_funcs(reward_funcs)
    check_kept_columns(args, reward_funcs, kwargs.get("train_dataset"))
    inputs = Inputs(
        model=model,
        args=args,
        processing_class=processing_class,
        reward_funcs=reward_funcs,
        datasets={name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")},
        for_trl={name: value for name, value in kwargs.items() if name not in _OWN},
        **{name: kwargs[name] for name in _OWN if name in kwargs},
    )
    if knows_rows and inputs.environment_factory is None:  # environments may read any column
        functions = () if inputs.rollout_func else reward_funcs or ()
        warn_of_unread_media(args, inputs.datasets, modalities(model, args), reward_funcs=functions)
    if inputs.datasets["train_dataset"] is None:
        rows = rows_for_environments(inputs.environment_factory, args)
        inputs = replace(inputs, for_trl={**inputs.for_trl, "train_dataset": rows})
    return inputs
