# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the trainer for supervised rows."""

from dataclasses import dataclass
from typing import Annotated

from trl import SFTConfig

from .arguments import help_from_docstring
from .multimodal_config import MediaArguments


# Options of TRL that this trainer can't follow: the values that ask for nothing, and why there is nothing else
_NOT_HERE = {
    "dataset_kwargs": (
        (None, {"skip_prepare_dataset": True}, {"skip_prepare_dataset": False}),
        "of these options, only `skip_prepare_dataset` is known",
    ),
    "dataset_num_proc": ((None,), "rows are encoded when they are read; raise `dataloader_num_workers`"),
    "shuffle_dataset": ((False,), "each epoch has another random order; `dataset.shuffle()` does it beforehand"),
    "packing_strategy": (("bfd",), "rows are packed whole, and never cut"),
    "padding_free": ((False,), "`packing=True` lays rows out without padding"),
    "pad_to_multiple_of": ((None,), "rows are as long as they are"),
    "pad_token": ((None,), "set `processing_class.tokenizer.pad_token`"),
    "label_smoothing_factor": ((0.0,), "the loss is the fused head's, which has no smoothing"),
    "use_liger_kernel": (
        (False,),
        "its forwards don't know packed rows; use `model_init_kwargs={'use_kernels': True}`",
    ),
    "train_sampling_strategy": (("random", "sequential"), "lengths aren't known before rows are read"),
    "include_num_input_tokens_seen": (("no", False), "the metric `num_tokens` counts them"),
}


@help_from_docstring
@dataclass
class MultimodalSFTConfig(MediaArguments, SFTConfig):
    r"""
    Configuration class for the [`MultimodalSFTTrainer`].

    Holds every argument of [`~trl.SFTConfig`] and of [`MediaArguments`]. Of TRL's, most about the preparation of
    datasets and those about padding have no use here, and raise.

    Parameters:
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Whether columns that the trainer doesn't know are taken from the rows.
        max_length (`int`, *optional*):
            Most tokens of a row. Longer ones of text are cut, as in [`~trl.SFTConfig`]; those with media are an error,
            or skipped (`on_media_error`), since no medium is cut. `None` takes rows as they are.
        packing (`bool`, *optional*, defaults to `False`):
            Whether the rows of a micro-batch are forwarded one behind the other, without padding, and don't see each
            other. Loss and gradient are those of padded rows; so is the number of rows in an update, unlike in TRL.
            Falls back to padded rows, with a message, where the model can't. `max_tokens_per_microbatch` bounds a
            forward.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that padded and packed rows have the
            log-probabilities of the model's own forward of each row.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    remove_unused_columns: bool | None = False
    max_length: Annotated[int | None, "[2, inf]"] = None
    packing: bool = False
    self_check: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name, (neutral, reason) in _NOT_HERE.items():
            if getattr(self, name) not in neutral:
                raise ValueError(f"`{name}={getattr(self, name)!r}` has no use in supervised training here: {reason}.")
        self.dataset_kwargs = {"skip_prepare_dataset": True}  # the collator encodes rows
        if self.neftune_noise_alpha is not None and (self.packing or self.eval_packing):
            raise ValueError(
                "The noise of `neftune_noise_alpha` depends on the length of a row, which packed rows don't have; set "
                "`packing=False`."
            )
