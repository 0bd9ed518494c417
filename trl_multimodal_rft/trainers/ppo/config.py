# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the PPO trainer."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from transformers import SchedulerType

from ...algorithms.advantages import describe_estimators
from ..base.config_options import Needs, check_values, help_from_docstring
from ..base.conflicts import Conflicts
from ..grpo.config import MultimodalGRPOConfig


# Options about the critic
_OF_CRITIC = ("bootstrap_truncated", "shared_trunk", "vf_coef", "cliprange_value", "value_learning_rate")
_OF_CRITIC += ("value_lr_scheduler_type", "value_warmup_steps", "freezing_actor_steps")


def _conflicts_of_ptx(args: Any) -> Conflicts:
    """Returns the conflict of the supervised loss with a temperature."""
    return [
        (
            args.ptx_coef > 0 and args.temperature != 1,
            "`ptx_coef` adds the likelihood of a dataset, which has no temperature; set `temperature=1`, got "
            f"{args.temperature}.",
        )
    ]


def _conflicts_of_critic(args: Any) -> Conflicts:
    """Returns conflicts of options about the critic with an estimator that has none."""
    return [
        (
            args.estimator.needs != "critic" and getattr(args, name) != getattr(MultimodalPPOConfig, name),
            f"`{name}` is about the critic, which `advantage_estimator={args.estimator.spelling!r}` doesn't have; "
            "remove it, or use 'gae'.",
        )
        for name in _OF_CRITIC
    ]


@dataclass(frozen=True)
class ValueSchedule:
    """The critic's learning rate and schedule."""

    rate: float
    lr_scheduler_type: str
    warmup_steps: float


@help_from_docstring
@dataclass
class MultimodalPPOConfig(MultimodalGRPOConfig):
    r"""
    Configuration class for the [`MultimodalPPOTrainer`].

    Holds every argument of [`MultimodalGRPOConfig`] (policy loss, KL divergence, rewards, entropy mask, resampling),
    and the arguments below. `docs/algorithms.md` says how they work together.

    Parameters:
        > Parameters that control the advantages

        advantage_estimator (`str` or `Callable`, *optional*, defaults to `"gae"`):
            How rewards become advantages. `"gae"` trains a critic. Its settings are `gamma`, the discount per token,
            and `lam`, GAE's $\lambda$, with the defaults `"gae(gamma=1.0, lam=0.95)"`. With the estimators of
            [`MultimodalGRPOConfig`], there is no critic.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            Whether the critic's value at the end of a completion that was cut off at `max_completion_length` stands in
            for the rewards that would follow. Otherwise, the return of a cut completion is its reward alone.

        > Parameters that control the critic

        shared_trunk (`bool`, *optional*, defaults to `False`):
            Whether the critic is only a head on the policy's last hidden states, without its own backbone.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss, added to the policy loss. Gradients of both are clipped by their common norm.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Largest change of a value since sampling that still lowers its loss. `None`, or `inf` on a command line,
            doesn't clip.
        value_learning_rate (`float`, *optional*):
            Initial learning rate of the critic. Defaults to `learning_rate`.
        value_lr_scheduler_type (`str`, *optional*):
            Schedule of the critic's learning rate. Defaults to `lr_scheduler_type`.
        value_warmup_steps (`float`, *optional*):
            Number of optimizer steps of the critic's warmup, or below 1 their share of the run. Defaults to
            `warmup_steps`.
        freezing_actor_steps (`int`, *optional*, defaults to `0`):
            Number of optimizer steps in the beginning that train the critic alone. The policy's schedule starts after
            them.

        > Parameters that control the updates

        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Number of times each batch of completions is trained on, in another order each time.
        ema_decay (`float`, *optional*):
            Decay of an exponential moving average of the policy's weights, per optimizer step, such as 0.992. It is
            saved in the model's folder `ema`. `None` keeps none.
        ptx_coef (`float`, *optional*, defaults to `0.0`):
            Weight of the supervised loss on `ptx_dataset`, see
            [InstructGPT](https://huggingface.co/papers/2203.02155).
        ptx_batch_size (`int`, *optional*, defaults to `1`):
            Number of supervised rows added to each micro-batch.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    advantage_estimator: str = field(
        default="gae",
        metadata={
            "help": f"How rewards become advantages: {describe_estimators('critic')} with a critic; without one "
            f"{describe_estimators(None, 'group')}, or in Python a function."
        },
    )
    bootstrap_truncated: bool = False
    shared_trunk: bool = False
    vf_coef: Annotated[float, "(0, inf)"] = 0.1
    cliprange_value: Annotated[float | None, "(0, inf]"] = 0.2
    value_learning_rate: Annotated[float | None, "(0, inf)"] = None
    value_lr_scheduler_type: str | None = None
    value_warmup_steps: Annotated[float | None, "[0, inf)"] = None
    freezing_actor_steps: Annotated[int, "[0, inf]"] = 0
    num_ppo_epochs: Annotated[int, "[1, inf]"] = 4
    ema_decay: Annotated[float | None, "(0, 1)"] = None
    ptx_coef: Annotated[float, "[0, inf)"] = 0.0
    ptx_batch_size: Annotated[int, "[1, inf)", Needs("ptx_coef")] = 1

    _has_critic = True  # other trainers reject a config with a critic
    _conflicts = (*MultimodalGRPOConfig._conflicts, _conflicts_of_ptx, _conflicts_of_critic)

    def __post_init__(self):
        check_values(self)
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(
                f"`num_iterations` ({self.num_iterations}) is called `num_ppo_epochs` here; set `num_ppo_epochs` "
                "instead."
            )
        self.num_iterations = self.num_ppo_epochs
        super().__post_init__()

    @property
    def value_schedule(self) -> ValueSchedule:
        """The critic's learning rate and schedule, by default the policy's."""
        return ValueSchedule(
            self.learning_rate if self.value_learning_rate is None else self.value_learning_rate,
            str(SchedulerType(self.value_lr_scheduler_type or self.lr_scheduler_type).value),
            self.warmup_steps if self.value_warmup_steps is None else self.value_warmup_steps,
        )
