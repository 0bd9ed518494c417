# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the RLOO trainer."""

from dataclasses import dataclass
from typing import Any, Literal

from trl import RLOOConfig

from ..base.config_options import check_values, help_from_docstring
from ..base.conflicts import Conflicts, check_conflicts
from ..base.multimodal_config import MultimodalArguments


def _conflicts_of_weights(args: Any) -> Conflicts:
    """Returns conflicts of the options that turn rewards into weights of completions."""
    low = args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    truncates = args.vllm_importance_sampling_mode == "sequence_truncate"
    return [
        (
            args.advantage_estimator is not None,
            "The loss of `MultimodalRLOOTrainer` takes RLOO's advantages only; remove `advantage_estimator`, or use "
            "`MultimodalGRPOTrainer`, which has other estimators and 'rloo', too.",
        ),
        (
            low is not None and high is not None and low >= high,
            f"`vllm_importance_sampling_clip_min` ({low}) must be below `vllm_importance_sampling_clip_max` ({high}).",
        ),
        (
            args.vllm_importance_sampling_correction and truncates and low is None and high is None,
            "`vllm_importance_sampling_mode='sequence_truncate'` needs a bound: set "
            "`vllm_importance_sampling_clip_max` or `vllm_importance_sampling_clip_min`.",
        ),
    ]


@help_from_docstring
@dataclass
class MultimodalRLOOConfig(MultimodalArguments, RLOOConfig):  # pyrefly: ignore[inconsistent-inheritance]
    r"""
    Configuration class for the [`MultimodalRLOOTrainer`].

    Holds every argument of [`~trl.RLOOConfig`] and of [`MultimodalArguments`].

    Parameters:
        advantage_estimator (`str`, *optional*):
            Not supported, since RLOO's loss takes RLOO's own advantage.

        > Parameters that control the tools

        max_tool_calling_iterations (`int`, *optional*):
            Maximum number of turns with tools in a completion, as in [`~trl.GRPOConfig`]. `None` allows any number.

        > Parameters that control vLLM

        vllm_importance_sampling_correction (`bool`, *optional*, defaults to `True`):
            Whether to weight completions by the ratio of their probabilities under the policy and under vLLM.
        vllm_importance_sampling_mode (`str`, *optional*):
            Treatment of a weight outside of the bounds `vllm_importance_sampling_clip_min` and
            `vllm_importance_sampling_clip_max`: `"sequence_mask"` leaves the completion out of the loss, and
            `"sequence_truncate"` uses the bound. Defaults to `"sequence_mask"`, or with `max_staleness` to
            `"sequence_truncate"`.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`):
            Upper bound of the weight of a completion.
        vllm_importance_sampling_clip_min (`float`, *optional*):
            Lower bound of the weight of a completion.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    advantage_estimator: str | None = None
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: Literal["sequence_mask", "sequence_truncate"] | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    _conflicts = (_conflicts_of_weights, *MultimodalArguments._conflicts)

    def __post_init__(self):
        check_values(self)
        if (self.num_generations or 0) < 2:
            raise ValueError(
                "RLOO compares the completions of a prompt, so `num_generations` must be at least 2, got "
                f"{self.num_generations}."
            )
        super().__post_init__()
        check_conflicts(self)
