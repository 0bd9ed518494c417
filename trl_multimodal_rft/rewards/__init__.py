# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward functions with TRL's signature, `f(completions, **columns) -> list[float | None]`."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from ..extras.judge import JudgeReward
    from ..extras.remote import RemoteReward
    from .answers import accuracy_reward, boxed_format_reward, format_reward
    from .bonuses import length_reward, tool_curiosity_reward
    from .choices import choice_reward
    from .grounding import (
        box_iou_reward,
        counting_reward,
        detection_reward,
        point_in_box_reward,
        regression_reward,
        temporal_iou_reward,
    )
    from .majority import majority_reward
    from .model import RewardModel
    from .preference import preference_reward
    from .recipe import apply_recipe
    from .transcripts import cer_reward, ocr_reward, wer_reward

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "..extras.judge": ["JudgeReward"],
        "..extras.remote": ["RemoteReward"],
        ".answers": ["accuracy_reward", "boxed_format_reward", "format_reward"],
        ".bonuses": ["length_reward", "tool_curiosity_reward"],
        ".choices": ["choice_reward"],
        ".grounding": [
            "box_iou_reward",
            "counting_reward",
            "detection_reward",
            "point_in_box_reward",
            "regression_reward",
            "temporal_iou_reward",
        ],
        ".majority": ["majority_reward"],
        ".model": ["RewardModel"],
        ".preference": ["preference_reward"],
        ".recipe": ["apply_recipe"],
        ".transcripts": ["cer_reward", "ocr_reward", "wer_reward"],
    },
)
