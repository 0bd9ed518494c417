# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the RLOO trainer."""

from dataclasses import dataclass, field

from trl import RLOOConfig

from .multimodal_config import MultimodalArguments


@dataclass
class MultimodalRLOOConfig(MultimodalArguments, RLOOConfig):
    r"""
    Configuration class for the [`MultimodalRLOOTrainer`].

    Holds every argument of [`~trl.RLOOConfig`] and of [`MultimodalArguments`].

    Parameters:
        advantage_estimator (`str`, *optional*):
            Not for this trainer, whose loss takes RLOO's one value per completion.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    advantage_estimator: str | None = field(
        default=None, metadata={"help": "Not for this trainer, whose loss takes RLOO's one value per completion."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.advantage_estimator is not None:
            raise ValueError(
                "The loss of `MultimodalRLOOTrainer` takes RLOO's one value per completion, so `advantage_estimator` "
                "can't be chosen. Use `MultimodalGRPOTrainer`, which has 'rloo' too."
            )
