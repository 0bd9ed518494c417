# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The configs of this package's trainers, as functions of all of them take them."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np


if TYPE_CHECKING:  # a trainer imports its own config alone: each takes 10 ms
    from .distillation_config import MultimodalDistillationConfig
    from .dpo_config import MultimodalDPOConfig
    from .grpo_config import MultimodalGRPOConfig
    from .kto_config import MultimodalKTOConfig
    from .reward_config import MultimodalRewardConfig
    from .rloo_config import MultimodalRLOOConfig
    from .sft_config import MultimodalSFTConfig


# PPO's is one of GRPO
SamplingConfig: TypeAlias = "MultimodalGRPOConfig | MultimodalRLOOConfig | MultimodalDistillationConfig"
ReadingConfig: TypeAlias = "MultimodalSFTConfig | MultimodalDPOConfig | MultimodalKTOConfig | MultimodalRewardConfig"
TrainerConfig: TypeAlias = "SamplingConfig | ReadingConfig"


def mapping(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """An option that commands take as JSON, which the config has parsed; empty if it isn't set."""
    return option if isinstance(option, dict) else {}


def stops_of(args: SamplingConfig) -> tuple[list[int], list[str]]:
    """Tokens and texts of `generation_kwargs` that end a completion, beside the model's ends of text."""
    found = map(mapping(args.generation_kwargs).get, ("stop_token_ids", "eos_token_id", "stop_strings", "stop"))
    tokens, ends, texts, stops = (np.atleast_1d([] if each is None else each).tolist() for each in found)
    return tokens + ends, texts + stops
