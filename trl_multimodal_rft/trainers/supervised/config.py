# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainer for supervised rows."""

from dataclasses import dataclass
from typing import Annotated

from trl import SFTConfig

from ..base.config_options import UNUSED_IN_READING, Unused, help_from_docstring
from ..base.conflicts import check_conflicts, conflicts_of_noise
from ..base.multimodal_config import MediaArguments


# Options of TRL that this trainer doesn't use
_UNUSED_OPTIONS = {
    **UNUSED_IN_READING,
    "dataset_kwargs": Unused(
        (None, {"skip_prepare_dataset": True}, {"skip_prepare_dataset": False}),
        "only its entry `skip_prepare_dataset` is known",
    ),
    "label_smoothing_factor": Unused((0.0,), "the loss is the fused head's, which has no smoothing"),
}


@help_from_docstring
@dataclass
class MultimodalSFTConfig(MediaArguments, SFTConfig):
    r"""
    Configuration class for the [`MultimodalSFTTrainer`].

    Holds every argument of [`~trl.SFTConfig`] and of [`MediaArguments`]. Most of TRL's arguments about the
    preparation of datasets, and those about padding, have no effect here, and cause a warning if they are set.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether to remove from the rows the columns that the trainer doesn't use.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens of a row of text. Longer rows are cut, as in [`~trl.SFTConfig`], and dropped if
            nothing to learn is left. Rows with media are never cut or dropped; the metrics `rows/cut` and
            `rows/longer_with_media` count both. `None` allows any length.
        packing (`bool`, *optional*, defaults to `False`):
            Whether to forward rows one after the other, without padding, and without attention between rows. Rows of a
            dataset of text are concatenated before the run, as by [`~trl.SFTTrainer`]. Rows of streams, of datasets
            with media or with a transform, and of any length (`max_length=None`) are packed with those of their
            micro-batch. Loss and gradient are those of padded rows. If the model doesn't support packing, rows are
            padded, with a message. To bound the tokens of a forward, set `max_tokens_per_microbatch`.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            same log-probabilities as in the model's own forward of a single row, and that log-probabilities depend on
            the media.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = 1024
    packing: bool = False
    self_check: bool = True

    _unused = _UNUSED_OPTIONS
    _conflicts = (conflicts_of_noise,)

    takes_prompt_learning = True

    def __post_init__(self):
        super().__post_init__()
        check_conflicts(self)
