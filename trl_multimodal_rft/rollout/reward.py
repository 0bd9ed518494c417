# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks around the call of reward functions."""

from collections.abc import Collection
from typing import Any

import torch
from accelerate.logging import get_logger

from ..data.columns import iter_refs


logger = get_logger(__name__)


def check_readers(names: Collection[str], prompts: Any, completions: Any) -> None:
    """
    Reward models of text can't judge media.

    Raises [`MediaError`] if prompts hold media, and warns if tools returned some.
    """
    ref = next(iter_refs(prompts), None)
    for name in names if ref is not None else ():
        raise ref.error(
            f"the reward model '{name}' would be given the text alone; pass its processor in "
            f"`reward_processing_classes` if it takes {ref.kind}, or use a reward function"
        )
    for name in names if next(iter_refs(completions), None) is not None else ():
        logger.warning_once(
            f"The reward model '{name}' reads text alone and doesn't get the media that tools returned; pass its "
            "processor in `reward_processing_classes` if it takes them."
        )


def warn_of_unscorable(rewards: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Warns of the first completion for which every function returned `None`, as TRL does. `rewards` is `(N, F)`."""
    rows = rewards.isnan().all(dim=1).nonzero()
    if len(rows):
        row = int(rows[0])
        shown = {name: each[row] for name, each in arguments.items() if isinstance(each, (list, tuple))}
        logger.warning(
            f"All reward functions returned None for the following kwargs:\n{shown}\n"
            "Please ensure that at least one reward function returns a valid reward."
        )
