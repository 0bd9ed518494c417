# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of the experience maker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accelerate import Accelerator
from transformers import GenerationConfig

from ...algorithms.advantages import ALIASES, ESTIMATORS, Estimator, as_estimator
from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...data.rows.unread import check_ignored
from ...spelling import check_choice, split_settings
from ...trainers.arguments import check_values
from ...trainers.multimodal_config import check_range


@dataclass
class ExperienceConfig:
    """
    Options of the experience maker. Options without a description here are those of the trainers, see
    [`MultimodalPPOConfig`].

    Args:
        advantage_estimator (`str`, *optional*, defaults to `"group_norm"`):
            `"group_norm"` (or `"grpo"`), `"rloo"`, `"reinforce"`, `"reinforce_baseline"`, `"cpgd"`, `"dr_grpo"` or
            `"gae"`, with settings as in [`MultimodalGRPOConfig`].
        n_samples_per_prompt (`int`, *optional*, defaults to `8`):
            Number of completions per prompt.
        micro_rollout_batch_size (`int`, *optional*, defaults to `8`):
            Number of completions that are sampled and scored at once.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Estimator of the field `kl` of experiences, which is logged. The penalty in rewards is always k1.
        kl_in_reward (`bool`, *optional*):
            Whether to subtract the KL divergence from the rewards. Defaults to `True` for `"gae"`, `"reinforce"`
            and `"rloo"`.
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
    kl_in_reward: bool | None = None
    soft_overlong_cache: int | None = None
    reward_running_scale: bool = False
    reward_clip_range: tuple[float, float] | None = None
    bootstrap_truncated: bool = False
    audio_overlong: Literal["raise", "truncate"] = "raise"
    label_column: str = "labels"
    progress: bool = True
    accelerator: Accelerator | None = None
    ignored_media_columns: Sequence[str] = ()
    media_rules: MediaRules = DEFAULT_RULES

    def __post_init__(self):
        estimator_name = split_settings(self.advantage_estimator)[0]
        if ALIASES.get(estimator_name, estimator_name) not in ESTIMATORS:
            check_choice("`advantage_estimator`", self.advantage_estimator, ESTIMATORS)
        if self.estimator.step_input:
            raise ValueError(f"`advantage_estimator={self.advantage_estimator!r}` needs `MultimodalGRPOTrainer`.")
        self.advantage_estimator = self.estimator.spelling
        check_values(self)
        for name in ("n_samples_per_prompt", "micro_rollout_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.n_samples_per_prompt < 2 and self.estimator.needs == "group":
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` compares the completions of a prompt, so "
                f"`n_samples_per_prompt` must be at least 2, got {self.n_samples_per_prompt}."
            )
        if self.soft_overlong_cache is not None and self.soft_overlong_cache < 1:
            raise ValueError(f"`soft_overlong_cache` must be at least 1, got {self.soft_overlong_cache}.")
        check_range(self, "reward_clip_range")
        check_ignored(self.ignored_media_columns)
        if self.kl_in_reward is None:
            self.kl_in_reward = self.estimator.name in ("gae", "reinforce", "rloo")

    @property
    def estimator(self) -> Estimator:
        """The estimator of the advantages, with its settings."""
        return as_estimator(self.advantage_estimator)


def check_generation_options(options: dict[str, Any]) -> None:
    """Raises a `ValueError` for unknown options of generation, and for `num_beams` and `num_return_sequences`."""
    unknown = options.keys() - (vars(GenerationConfig()).keys() - {"num_return_sequences", "num_beams"})
    if unknown:
        raise ValueError(f"`{min(unknown)}` is no option of sampling here; correct or remove it.")
