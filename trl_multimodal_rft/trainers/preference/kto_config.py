# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the KTO trainer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import KTOConfig

from ..base.arguments import LAYOUT_OPTIONS, UNUSED_OPTIONS, check_noise, check_unused, help_from_docstring
from ..base.multimodal_config import MediaArguments


# Options of TRL that this trainer doesn't use, with their neutral values, and the reason why other values raise an
# error
_UNUSED_OPTIONS = {
    **UNUSED_OPTIONS,
    "label_smoothing_factor": ((0.0,), "the loss has no labels to smooth"),
}
# Options that change no result, of which other values cause a warning
_LAYOUT_OPTIONS = {
    **LAYOUT_OPTIONS,
    "precompute_ref_batch_size": (
        (None,),
        "the KL estimate depends on the micro-batch, so the reference scores those of `per_device_train_batch_size`",
    ),
}
_LOSSES = ("kto", "apo_zero_unpaired")


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

    def __post_init__(self):
        super().__post_init__()
        check_unused(self, _UNUSED_OPTIONS, "KTO", _LAYOUT_OPTIONS)
        check_noise(self, self.packing == "prefix", "set `packing='padded'`")
        if self.loss_type not in _LOSSES:
            raise ValueError(f"`loss_type` must be {' or '.join(map(repr, _LOSSES))}, got {self.loss_type!r}.")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` needs a fixed reference, but `sync_ref_model=True` updates it; "
                "remove one of them."
            )
