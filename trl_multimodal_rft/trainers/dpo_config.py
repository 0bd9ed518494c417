# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the DPO trainer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import DPOConfig

from .arguments import NOT_WHEN_READING, check_unused, help_from_docstring
from .multimodal_config import MediaArguments


# Options of TRL that this trainer can't follow: the values that ask for nothing, and why there is nothing else
_NOT_HERE = {
    **NOT_WHEN_READING,
    "padding_free": ((False,), '`packing="prefix"` lays completions out without padding'),
    "truncation_mode": (("keep_start",), "prompts have media, which aren't cut"),
    "precompute_ref_batch_size": ((None,), "`per_device_eval_batch_size` is that of the reference, too"),
    "label_smoothing_factor": ((0.0,), "DPO's is `label_smoothing`"),
}


@help_from_docstring
@dataclass
class MultimodalDPOConfig(MediaArguments, DPOConfig):
    r"""
    Configuration class for the [`MultimodalDPOTrainer`].

    Holds every argument of [`~trl.DPOConfig`] and of [`MediaArguments`]. Of TRL's, those about the preparation of
    datasets and about padding have no use here, and raise.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether columns that the trainer doesn't know are taken from the rows.
        max_length (`int`, *optional*):
            Most tokens of a prompt and a completion, which is cut. A prompt that leaves no token of it is an error, or
            skipped (`on_media_error`). `None` takes rows as they are.
        packing (`str`, *optional*, defaults to `"prefix"`):
            `"prefix"` forwards a prompt and its media once for both completions, and falls back to `"padded"`, a row
            per completion, with a message, where the model can't. Loss and gradient are the same.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            log-probabilities of the model's own forward of each prompt and completion.

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
        check_unused(self, _NOT_HERE, "DPO")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` needs a reference that stays, and `sync_ref_model=True` moves it; "
                "drop one of them."
            )
