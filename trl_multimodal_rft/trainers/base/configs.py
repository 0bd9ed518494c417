# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Types of the trainers' configs, and functions that read options of several configs."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .argument_checks import mapping


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

# Options of vLLM and transformers in `generation_kwargs` that don't change log-probabilities of sampled tokens. The
# trainer's scores account for suppressed tokens and biases.
_NEUTRAL_OPTIONS = {"max_tokens", "seed", "stop", "stop_token_ids", "detokenize", "logit_bias"}
_NEUTRAL_OPTIONS |= {"max_new_tokens", "stop_strings", "use_cache", "cache_implementation", "suppress_tokens"}


def stops_of(args: SamplingConfig) -> tuple[list[int], list[str]]:
    """Returns the ids of stop tokens and the stop strings in `generation_kwargs`, without the model's end of text."""
    # The values of four options. A value is a single token or string, or a list, and `atleast_1d` makes each a list
    options = map(mapping(args.generation_kwargs).get, ("stop_token_ids", "eos_token_id", "stop_strings", "stop"))
    ids, eos_ids, strings, stops = (np.atleast_1d([] if option is None else option).tolist() for option in options)
    return ids + eos_ids, strings + stops


def needs_reference(args: SamplingConfig) -> bool:
    """Returns whether a reference is loaded if none is passed."""
    return args.beta_is_kl and args.beta != 0


def options_that_exclude_tokens(args: SamplingConfig) -> dict[str, Any]:
    """Returns the options that exclude tokens from sampling, with their values."""
    neutral_values = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    neutral_values |= {"vllm_structured_outputs_regex": (None,), "structured_outputs": (None,)}
    options = {**vars(args), **mapping(args.generation_kwargs)}
    return {name: options[name] for name, values in neutral_values.items() if options.get(name) not in values}


def sampling_changes(args: SamplingConfig) -> list[str]:
    """
    Returns the names of options that change the distribution of sampled tokens from the softmax of the logits at the
    temperature.
    """
    names = [*options_that_exclude_tokens(args), *(mapping(args.generation_kwargs).keys() - _NEUTRAL_OPTIONS)]
    if args.repetition_penalty not in (None, 1.0):
        names.append("repetition_penalty")
    return sorted({*names})
