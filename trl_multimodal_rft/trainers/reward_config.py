# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainer of reward models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import RewardConfig

from .arguments import NOT_WHEN_READING, check_unused, help_from_docstring
from .multimodal_config import MediaArguments


# Options of TRL that this trainer can't follow: the values that ask for nothing, and why there is nothing else
_NOT_HERE = {
    **NOT_WHEN_READING,
    "label_smoothing_factor": ((0.0,), "the loss has no labels; rows without a better completion have a true `tie`"),
}


@help_from_docstring
@dataclass
class MultimodalRewardConfig(MediaArguments, RewardConfig):
    r"""
    Configuration class for the [`MultimodalRewardTrainer`].

    Holds every argument of [`~trl.RewardConfig`] and of [`MediaArguments`]. Of TRL's, those about the preparation of
    datasets and about padding have no use here, and raise.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether columns that the trainer doesn't know are taken from the rows.
        max_length (`int`, *optional*):
            Most tokens of a prompt and a completion. A row with more is an error, or skipped (`on_media_error`).
            `None` takes rows as they are.
        packing (`str`, *optional*, defaults to `"prefix"`):
            `"prefix"` forwards a prompt and its media once for both completions, and falls back to `"padded"`, a row
            per completion, with a message, where the model can't. Loss and gradient are the same.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            scores of the model's own forward of each prompt and completion, and that these depend on its media.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = None
    packing: Literal["prefix", "padded"] = "prefix"
    self_check: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_unused(self, _NOT_HERE, "training of reward models")
