# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Types of the arguments that all trainers take."""

from typing import TYPE_CHECKING, Any, TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, ProcessorMixin


if TYPE_CHECKING:  # an optional package
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel


Model: TypeAlias = "str | PreTrainedModel | PeftModel"
Adapter: TypeAlias = "PeftConfig | None"
Rows = Dataset | IterableDataset | None
EvalRows = Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset] | None
Processor = PreTrainedTokenizerBase | ProcessorMixin
Optimizers = tuple[Optimizer | None, LambdaLR | None]


def arguments_of(scope: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """Returns a constructor's arguments from its `locals()`, without `self` and the names in `left_out`."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *left_out)}
