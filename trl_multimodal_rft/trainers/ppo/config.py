# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the PPO trainer."""

import functools
from dataclasses import dataclass, field
from typing import Annotated

from transformers import SchedulerType

from ...algorithms.advantages import describe_estimators
from ...spelling import as_number, check_choice, read_settings
from ..base.arguments import check_values, help_from_docstring
from ..grpo.config import MultimodalGRPOConfig


@dataclass(frozen=True)
class ValueSchedule:
    """Settings of the option `value_learning_rate`, by default those of the policy."""

    rate: Annotated[float, "(0, inf)"]
    lr_scheduler_type: str
    warmup_steps: Annotated[float, "[0, inf)"]


@dataclass(frozen=True)
class ValueLoss:
    """Settings of the option `vf_coef`."""

    coef: Annotated[float, "(0, inf)"]
    cliprange: Annotated[float | None, "(0, inf]"] = 0.2


@dataclass(frozen=True)
class SupervisedLoss:
    """Settings of the option `ptx_coef`."""

    coef: Annotated[float, "[0, inf)"]
    batch_size: Annotated[int, "[1, inf)"] = 1  # rows per micro-batch


@help_from_docstring
@dataclass
class MultimodalPPOConfig(MultimodalGRPOConfig):
    r"""
    Configuration class for the [`MultimodalPPOTrainer`].

    Holds every argument of [`MultimodalGRPOConfig`] (policy loss, KL divergence, rewards, entropy mask, resampling),
    and the arguments below. `docs/ppo.md` says how they work together.

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
        vf_coef (`float` or `str`, *optional*, defaults to `0.1`):
            Weight of the value loss, added to the policy loss. Gradients of both are clipped by their common norm. The
            setting `cliprange` (0.2), as in `"0.1(cliprange=0.4)"`, is the largest change of a value since sampling
            that still lowers its loss. `None` doesn't clip.
        value_learning_rate (`float` or `str`, *optional*):
            Initial learning rate of the critic. Defaults to `learning_rate`. Settings, as in
            `"1e-5(lr_scheduler_type='cosine', warmup_steps=10)"`, are the critic's schedule, and its warmup as a
            number of optimizer steps, or below 1 as a share of them. They default to the arguments of the same names.
        freezing_actor_steps (`int`, *optional*, defaults to `0`):
            Number of optimizer steps in the beginning that train the critic alone. The policy's schedule starts after
            them.

        > Parameters that control the updates

        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Number of times each batch of completions is trained on, in another order each time.
        ema_decay (`float`, *optional*):
            Decay of an exponential moving average of the policy's weights, per optimizer step, such as 0.992. It is
            saved in the model's folder `ema`. `None` keeps none.
        ptx_coef (`float` or `str`, *optional*, defaults to `0.0`):
            Weight of the supervised loss on `ptx_dataset`, see
            [InstructGPT](https://huggingface.co/papers/2203.02155). A setting `batch_size` (1), as in
            `"0.1(batch_size=2)"`, is the number of supervised rows added to each micro-batch.

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
    # The types include `None`, which is rejected, because the parser would read `float | str` as `float`
    vf_coef: float | str | None = 0.1
    value_learning_rate: float | str | None = None
    freezing_actor_steps: Annotated[int, "[0, inf]"] = 0
    num_ppo_epochs: Annotated[int, "[1, inf]"] = 4
    ema_decay: Annotated[float | None, "(0, 1)"] = None
    ptx_coef: float | str | None = 0.0

    _has_critic = True  # other trainers reject a config with a critic

    def __post_init__(self):
        check_values(self)
        for name in ("vf_coef", "value_learning_rate", "ptx_coef"):
            setattr(self, name, as_number(getattr(self, name)))
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(
                f"`num_iterations` ({self.num_iterations}) is called `num_ppo_epochs` here; set `num_ppo_epochs` "
                "instead."
            )
        self.num_iterations = self.num_ppo_epochs
        super().__post_init__()

        _ = self.value_loss  # raises if it is invalid
        schedules = [schedule.value for schedule in SchedulerType]
        check_choice("`lr_scheduler_type` of `value_learning_rate`", self.value_schedule.lr_scheduler_type, schedules)
        if self.ptx.coef > 0 and self.temperature != 1:
            raise ValueError(
                "`ptx_coef` adds the likelihood of a dataset, which has no temperature; set `temperature=1`, got "
                f"{self.temperature}."
            )
        if self.estimator.needs != "critic":
            for name in ("bootstrap_truncated", "shared_trunk", "value_learning_rate", "freezing_actor_steps"):
                if getattr(self, name):
                    raise ValueError(
                        f"`{name}` is about the critic, which `advantage_estimator={self._estimator_name()!r}` "
                        "doesn't have; remove it, or use 'gae'."
                    )

    @property
    def value_schedule(self) -> ValueSchedule:
        """The critic's learning rate and schedule, by default the policy's."""
        make_schedule = functools.partial(
            ValueSchedule,
            lr_scheduler_type=str(SchedulerType(self.lr_scheduler_type).value),
            warmup_steps=self.warmup_steps,
        )
        if self.value_learning_rate is None:
            return make_schedule(self.learning_rate)
        return read_settings(make_schedule, "value_learning_rate", self.value_learning_rate)

    @property
    def value_loss(self) -> ValueLoss:
        """The weight of the value loss, and the clip range of values."""
        return read_settings(ValueLoss, "vf_coef", self.vf_coef)

    @property
    def ptx(self) -> SupervisedLoss:
        """The weight of the supervised loss, and its number of rows per micro-batch."""
        return read_settings(SupervisedLoss, "ptx_coef", self.ptx_coef)
