# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainer of reward models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import RewardConfig

from ..base.config_options import UNUSED_IN_READING, Unused, help_from_docstring
from ..base.conflicts import check_conflicts, conflicts_of_noise
from ..base.multimodal_config import MediaArguments


# Options of TRL that this trainer doesn't use
_UNUSED_OPTIONS = {
    **UNUSED_IN_READING,
    "label_smoothing_factor": Unused(
        (0.0,),
        "the loss has no labels; a row without a better completion needs `tie=True` in the dataset",
    ),
}


@help_from_docstring
@dataclass
class MultimodalRewardConfig(MediaArguments, RewardConfig):
    r"""
    Configuration class for the [`MultimodalRewardTrainer`].

    Holds every argument of [`~trl.RewardConfig`] and of [`MediaArguments`]. TRL's arguments about the preparation of
    datasets and about padding have no effect here, and cause a warning if they are set.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether to remove from the rows the columns that the trainer doesn't use.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens of a prompt and one completion of text together. Longer rows are dropped. Rows
            with media aren't; the metric `rows/longer_with_media` counts those that are longer. `None` allows any
            length.
        packing (`str`, *optional*, defaults to `"prefix"`):
            `"prefix"` forwards a prompt and its media once for both completions, `"padded"` forwards one row per
            completion. Both give the same loss and gradient. Models that don't support `"prefix"` fall back to
            `"padded"`, with a message.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            same scores as in the model's own forward of a prompt with one completion, and that scores depend on the
            media.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = 1024
    packing: Literal["prefix", "padded"] = "prefix"
    self_check: bool = True

    _unused = _UNUSED_OPTIONS
    _conflicts = (conflicts_of_noise,)

    def __post_init__(self):
        super().__post_init__()
        check_conflicts(self)
