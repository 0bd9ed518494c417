# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the KTO trainer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import KTOConfig

from ..base.config_options import UNUSED_IN_READING, Unused, help_from_docstring
from ..base.conflicts import check_conflicts, conflicts_of_noise, conflicts_of_reference
from ..base.multimodal_config import MediaArguments


# Options of TRL that this trainer doesn't use
_UNUSED_OPTIONS = {
    **UNUSED_IN_READING,
    "label_smoothing_factor": Unused((0.0,), "the loss has no labels to smooth"),
    "precompute_ref_batch_size": Unused(
        (None,),
        "the KL estimate depends on the micro-batch, so the reference scores those of `per_device_train_batch_size`",
        is_error=False,
    ),
}


@help_from_docstring
@dataclass
class MultimodalKTOConfig(MediaArguments, KTOConfig):
    r"""
    Configuration class for the [`MultimodalKTOTrainer`].

    Holds every argument of [`~trl.KTOConfig`] and of [`MediaArguments`]. TRL's arguments about the preparation of
    datasets and about padding have no effect here, and cause a warning if they are set.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether to remove from the rows the columns that the trainer doesn't use.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens of a prompt and a completion of text together. Longer completions are cut, and
            rows whose prompt leaves no token for a completion are dropped. Rows with media are never cut or dropped;
            the metrics `rows/cut` and `rows/longer_with_media` count both. `None` takes rows as they are.
        packing (`str`, *optional*, defaults to `"prefix"`):
            `"prefix"` forwards a prompt and its media once for its completion and for the completion of the KL
            estimate, `"padded"` forwards one row per completion. Both give the same loss and gradient. Models that
            don't support `"prefix"` fall back to `"padded"`, with a message.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            same log-probabilities as in the model's own forward of a prompt with one completion, and that
            log-probabilities depend on the media.
        media_contribution_steps (`int`, *optional*, defaults to `10`):
            Number of optimizer steps between measurements of the metric `media/contribution`: how far the
            log-probabilities of completions move, in nats per token, when sounds of their prompts become silent, and
            images and videos grey. A measurement takes two forward passes of two completions. The metric is a moving
            average, in which the latest measurement weighs 0.3. Evaluations measure it once. 0 measures nothing.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = 1024
    packing: Literal["prefix", "padded"] = "prefix"
    self_check: bool = True
    media_contribution_steps: Annotated[int, "[0, inf]"] = 10

    _annotations = {"loss_type": Literal["kto", "apo_zero_unpaired"]}
    _unused = _UNUSED_OPTIONS
    _conflicts = (conflicts_of_noise, conflicts_of_reference)

    def __post_init__(self):
        super().__post_init__()
        check_conflicts(self)
