# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a method consists of. The folder of each method lists its parts in a `method.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Method:
    """Parts of a method, which its trainer takes from here. The rest of a step is the same for all methods."""

    name: str  # the second tag of a trained model
    advantages: Callable | None = None  # of completions or tokens, from rewards; `None` without rewards
    # Where the KL divergence from the reference counts: subtracted from rewards, or as a term of the loss
    kl: tuple[Literal["reward", "loss"], ...] = ()
    loss: Callable | None = None  # `None` for TRL's loss
    terms: Mapping[str, Callable] = field(default_factory=dict)  # of the loss, by the options that weigh them
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the options that make the method what it is

    @property
    def tags(self) -> list[str]:
        """Tags of a trained model."""
        return ["trl", self.name, "trl-multimodal-rft"]
