# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows of a dataset and their prompts, read and encoded in worker processes ahead of the step that needs them."""

from dataclasses import dataclass
from typing import Any

from ..encoding.prompts import EncodedPrompt


@dataclass(eq=False)
class EncodedRow:
    """A row of a dataset and its prompt, one object for all completions of a group."""

    number: int  # of the row in its dataset
    row: dict[str, Any]  # all columns as the dataset has them; a feature decodes its medium when it is accessed
    # The prompt as text, or as messages whose media are `MediaRef`s; `None` if an environment or `rollout_func` makes it
    messages: Any = None
    prompt: EncodedPrompt | None = None  # `None` without media: text is tokenized as the other rows of its batch are
    error: str | None = None  # why the row can't be read, in which case it has neither messages nor prompt
