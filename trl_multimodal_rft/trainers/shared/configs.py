# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Types of the trainers' configs, and functions that read options of several configs."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .arguments import mapping


if TYPE_CHECKING:  # importing a config takes 10 ms, so a trainer imports only its own
    from ..distillation.config import MultimodalDistillationConfig
    from ..grpo.config import MultimodalGRPOConfig
    from ..preference.dpo_config import MultimodalDPOConfig
    from ..preference.kto_config import MultimodalKTOConfig
    from ..preference.reward_config import MultimodalRewardConfig
    from ..rloo.config import MultimodalRLOOConfig
    from ..supervised.config import MultimodalSFTConfig


# Configs of trainers that sample completions, and of trainers that read completions from a dataset. PPO's config is a
# subclass of GRPO's
SamplingConfig: TypeAlias = "MultimodalGRPOConfig | MultimodalRLOOConfig | MultimodalDistillationConfig"
ReadingConfig: TypeAlias = "MultimodalSFTConfig | MultimodalDPOConfig | MultimodalKTOConfig | MultimodalRewardConfig"
TrainerConfig: TypeAlias = "SamplingConfig | ReadingConfig"


def stops_of(args: SamplingConfig) -> tuple[list[int], list[str]]:
    """Returns the ids of stop tokens and the stop strings in `generation_kwargs`, without the model's end of text."""
    # The values of four options. A value is a single token or string, or a list, and `atleast_1d` makes each a list
    options = map(mapping(args.generation_kwargs).get, ("stop_token_ids", "eos_token_id", "stop_strings", "stop"))
    ids, eos_ids, strings, stops = (np.atleast_1d([] if option is None else option).tolist() for option in options)
    return ids + eos_ids, strings + stops
