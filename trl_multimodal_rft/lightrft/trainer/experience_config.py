# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of the experience maker."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from accelerate import Accelerator
from transformers import GenerationConfig

from ...algorithms.advantages import ALIASES, ESTIMATORS, Estimator, as_estimator, dr_grpo, group_norm, rloo
from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...data.rows.unread import check_ignored
from ...spelling import check_choice, check_interval, split_settings
from ...trainers.base.config_options import check_values


# Estimators that compare the completions of a prompt, with the advantages that become rewards. LightRFT adds 1e-8 to
# the standard deviation of a group, while TRL and this package's own trainers add 1e-4.
COMPARISONS = {"group_norm": partial(group_norm, eps=1e-8), "rloo": rloo}
COMPARISONS |= {"reinforce_baseline": dr_grpo, "dr_grpo": dr_grpo}
MAKER_ESTIMATORS = (*COMPARISONS, "reinforce", "cpgd", "gae")
NORMALIZED = ("gae", "reinforce", "reinforce_baseline")  # whose advantages are normalized over the batch


@dataclass
class ExperienceConfig:
    """
    Options of the experience maker. Options without a description here are those of the trainers, see
    [`MultimodalPPOConfig`].

    Args:
        advantage_estimator (`str`, *optional*, defaults to `"group_norm"`):
            `"group_norm"` (or `"grpo"`), `"rloo"`, `"reinforce_baseline"`, `"dr_grpo"`, `"reinforce"`, `"cpgd"` or
            `"gae"`. But for `"gae"`, the advantage of a token is its discounted return, see
            [`NaiveExperienceMaker.make_experience_list`].
        n_samples_per_prompt (`int`, *optional*, defaults to `8`):
            Number of completions per prompt.
        micro_rollout_batch_size (`int`, *optional*, defaults to `8`):
            Number of completions that are sampled and scored at once.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Estimator of a token's KL divergence, which is logged and is the penalty in rewards. `"k3"` is LightRFT's
            `use_kl_estimator_k3`.
        kl_in_reward (`bool`, *optional*, defaults to `True`):
            Whether to subtract the KL divergence, times the controller's coefficient, from the rewards of tokens.
        reward_running_scale (`bool`, *optional*, defaults to `False`):
            Whether to divide shaped rewards by their running deviation.
        reward_clip_range (`tuple[float, float]`, *optional*):
            Range to clip shaped rewards to.
        no_advantage_std_norm (`bool`, *optional*, defaults to `False`):
            Whether advantages are shifted, but not scaled, over the batch.
        label_column (`str`, *optional*, defaults to `"labels"`):
            Column with the ground truth.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            Accelerator. Statistics cover all its ranks, and models score in its mixed precision.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.

    Raises:
        `ValueError`: If an argument is invalid, or if the estimator compares completions but there is one per prompt.
    """

    advantage_estimator: str = "group_norm"
    n_samples_per_prompt: int = 8
    micro_rollout_batch_size: int = 8
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in_reward: bool = True
    soft_overlong_cache: int | None = None
    reward_running_scale: bool = False
    reward_clip_range: tuple[float, float] | None = None
    no_advantage_std_norm: bool = False
    bootstrap_truncated: bool = False
    audio_overlong: Literal["raise", "truncate"] = "raise"
    label_column: str = "labels"
    progress: bool = True
    accelerator: Accelerator | None = None
    ignored_media_columns: Sequence[str] = ()
    media_rules: MediaRules = DEFAULT_RULES

    def __post_init__(self):
        name, settings = split_settings(self.advantage_estimator)
        name = ALIASES.get(name, name)
        if name in ESTIMATORS and name not in MAKER_ESTIMATORS:
            raise ValueError(f"`advantage_estimator={self.advantage_estimator!r}` needs `MultimodalGRPOTrainer`.")
        check_choice("`advantage_estimator`", name, MAKER_ESTIMATORS)
        if settings and name != "gae":
            raise ValueError(
                f"`{min(settings)}` of `advantage_estimator={self.advantage_estimator!r}` has no effect on the "
                "returns of an experience maker; remove it, or use `MultimodalGRPOTrainer`."
            )
        self.advantage_estimator = self.estimator.spelling
        check_values(self)
        for name in ("n_samples_per_prompt", "micro_rollout_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.n_samples_per_prompt < 2 and self.compares_groups:
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` compares the completions of a prompt, so "
                f"`n_samples_per_prompt` must be at least 2, got {self.n_samples_per_prompt}."
            )
        if self.soft_overlong_cache is not None and self.soft_overlong_cache < 1:
            raise ValueError(f"`soft_overlong_cache` must be at least 1, got {self.soft_overlong_cache}.")
        users = {"bootstrap_truncated": ("gae",), "no_advantage_std_norm": NORMALIZED}
        for name, estimators in users.items():
            if getattr(self, name) and self.estimator.name not in estimators:
                raise ValueError(
                    f"`{name}` has no effect with `advantage_estimator={self.advantage_estimator!r}`, only with "
                    f"{', '.join(map(repr, estimators))}; remove it."
                )
        check_ignored(self.ignored_media_columns)

    @property
    def args(self) -> Self:
        """The options themselves, where LightRFT's code reads `strategy.args`."""
        return self

    @property
    def compares_groups(self) -> bool:
        """Whether rewards are shaped by those of the prompt's other completions."""
        return self.estimator.name in COMPARISONS

    @property
    def use_kl_estimator_k3(self) -> bool:
        """LightRFT's name of `kl_estimator="k3"`."""
        return self.kl_estimator == "k3"

    @property
    def estimator(self) -> Estimator:
        """The estimator of the advantages, with its settings."""
        return as_estimator(self.advantage_estimator)


def check_generation_options(options: dict[str, Any]) -> None:
    """Raises a `ValueError` for unknown options of generation, and for `num_beams` and `num_return_sequences`."""
    unknown = options.keys() - (vars(GenerationConfig()).keys() - {"num_return_sequences", "num_beams"})
    if unknown:
        raise ValueError(f"`{min(unknown)}` is no option of sampling here; correct or remove it.")


def check_discounts(options: dict[str, Any]) -> None:
    """Raises a `ValueError` if a discount isn't within [0, 1]. Only `"gae"` reads `lambd`."""
    for name in ("gamma", "lambd"):
        value = options.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`{name}` must be a number, got {value!r}.")
        check_interval(f"`{name}`", value, "[0, 1]", "it is a discount per action")
