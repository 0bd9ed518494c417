# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the PPO trainer."""

from dataclasses import dataclass, field
from typing import Annotated

from transformers import SchedulerType

from ..algorithms.advantages import described
from ..spelling import check_choice, read_settings
from .arguments import check_values, help_from_docstring
from .grpo_config import MultimodalGRPOConfig


@dataclass(frozen=True)
class ValueSchedule:
    """The option `value_lr_scheduler_type`."""

    type: str
    warmup_steps: Annotated[float | None, "[0, inf]"] = None  # by default the steps of the policy's schedule


@help_from_docstring
@dataclass
class MultimodalPPOConfig(MultimodalGRPOConfig):
    r"""
    Configuration class for the [`MultimodalPPOTrainer`].

    Holds every argument of [`MultimodalGRPOConfig`] (policy loss, KL divergence, rewards, entropy mask, resampling),
    and those below. `docs/ppo.md` says how these arguments work together.

    Parameters:
        > Parameters that control the advantages

        advantage_estimator (`str` or `Callable`, *optional*, defaults to `"gae"`):
            How rewards become advantages. `"gae"` has a critic, and the settings `gamma`, the discount per token, and
            `lam`, GAE's $\lambda$, as in `"gae(gamma=1.0, lam=0.95)"`, the default. The estimators of
            [`MultimodalGRPOConfig`] have no critic.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            Whether the critic's value stands for the rewards after the end of a completion that was cut off at
            `max_completion_length`, on top of its reward. Without it, a cut completion is worth its reward alone.

        > Parameters that control the critic

        shared_trunk (`bool`, *optional*, defaults to `False`):
            Whether the critic is only a head on the policy's last hidden states, without its own backbone.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss, added to the policy loss. Both share one gradient norm to clip.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Distance from the value at sampling beyond which moving a value doesn't lower its loss. `None` doesn't
            clip.
        value_learning_rate (`float`, *optional*):
            Initial learning rate of the critic. Defaults to `learning_rate`.
        value_lr_scheduler_type (`str`, *optional*):
            Schedule of the critic's learning rate. Defaults to `lr_scheduler_type`. A setting `warmup_steps`, as in
            `"cosine(warmup_steps=10)"`, is its warmup, in optimizer steps, or below 1 as their share, and defaults to
            the argument of the same name.
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
        per_device_ptx_batch_size (`int`, *optional*, defaults to `1`):
            Number of supervised rows added to each micro-batch.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    advantage_estimator: str = field(
        default="gae",
        metadata={
            "help": f"How rewards become advantages: {described('critic')} with a critic; without one "
            f"{described(None, 'group')}, or in Python a function."
        },
    )
    bootstrap_truncated: bool = False
    shared_trunk: bool = False
    vf_coef: Annotated[float, "(0, inf)"] = 0.1
    cliprange_value: Annotated[float | None, "(0, inf]"] = 0.2
    value_learning_rate: Annotated[float | None, "(0, inf)"] = None
    value_lr_scheduler_type: str | None = None
    freezing_actor_steps: Annotated[int, "[0, inf]"] = 0
    num_ppo_epochs: Annotated[int, "[1, inf]"] = 4
    ema_decay: Annotated[float | None, "(0, 1)"] = None
    ptx_coef: Annotated[float, "[0, inf)"] = 0.0
    per_device_ptx_batch_size: Annotated[int, "[1, inf]"] = 1

    _has_critic = True

    def __post_init__(self):
        check_values(self)
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(
                f"`num_iterations` ({self.num_iterations}) is called `num_ppo_epochs` here; set that instead."
            )
        self.num_iterations = self.num_ppo_epochs
        super().__post_init__()

        schedules = [schedule.value for schedule in SchedulerType]
        check_choice("`value_lr_scheduler_type`", self.value_schedule.type, schedules)
        if self.ptx_coef > 0 and self.temperature != 1:
            raise ValueError(
                f"`ptx_coef` adds the likelihood of a dataset, which is that of the policy at `temperature=1`, got "
                f"{self.temperature}. Set one of them back."
            )
        if self.estimator.needs != "critic":
            names = ("bootstrap_truncated", "shared_trunk", "value_learning_rate", "value_lr_scheduler_type")
            for name in (*names, "freezing_actor_steps"):
                if getattr(self, name):
                    raise ValueError(
                        f"`{name}` is about the critic, which `advantage_estimator={self._estimator_name()!r}` "
                        "doesn't have; remove it, or use 'gae'."
                    )

    @property
    def value_schedule(self) -> ValueSchedule:
        """The schedule of the critic's learning rate."""
        text = self.value_lr_scheduler_type or str(SchedulerType(self.lr_scheduler_type).value)
        return read_settings(ValueSchedule, "value_lr_scheduler_type", text)
