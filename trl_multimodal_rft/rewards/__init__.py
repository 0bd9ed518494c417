# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward functions with TRL's signature, `f(completions, **columns) -> list[float | None]`."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from ..extras.judge import JudgeReward
    from ..extras.remote import RemoteReward
    from .answers import accuracy_reward, boxed_format_reward, format_reward
    from .model import RewardModel
    from .ready.bonuses import length_reward, tool_curiosity_reward
    from .ready.choices import choice_reward
    from .ready.grounding import (
        box_iou_reward,
        counting_reward,
        detection_reward,
        point_in_box_reward,
        regression_reward,
        temporal_iou_reward,
    )
    from .ready.majority import majority_reward
    from .ready.preference import preference_reward
    from .ready.recipe import apply_recipe
    from .ready.speech import duration_reward, speaker_reward, spoken_wer_reward, whole_frames_reward
    from .ready.transcripts import cer_reward, ocr_reward, wer_reward

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "..extras.judge": ["JudgeReward"],
        "..extras.remote": ["RemoteReward"],
        ".answers": ["accuracy_reward", "boxed_format_reward", "format_reward"],
        ".ready.bonuses": ["length_reward", "tool_curiosity_reward"],
        ".ready.choices": ["choice_reward"],
        ".ready.grounding": [
            "box_iou_reward",
            "counting_reward",
            "detection_reward",
            "point_in_box_reward",
            "regression_reward",
            "temporal_iou_reward",
        ],
        ".ready.majority": ["majority_reward"],
        ".model": ["RewardModel"],
        ".ready.preference": ["preference_reward"],
        ".ready.recipe": ["apply_recipe"],
        ".ready.speech": ["duration_reward", "speaker_reward", "spoken_wer_reward", "whole_frames_reward"],
        ".ready.transcripts": ["cer_reward", "ocr_reward", "wer_reward"],
    },
)
