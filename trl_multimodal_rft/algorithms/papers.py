# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Papers behind functions, read from their docstrings."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, or the method that is known by it."""

    title: str
    number: str  # on arXiv

    @property
    def link(self) -> str:
        """In Markdown."""
        return f"[{self.title}](https://huggingface.co/papers/{self.number})"


def paper_of(function: Callable) -> Paper | None:
    """The first paper that a docstring links; `None` without one, as when Python strips docstrings (`-OO`)."""
    found = re.search(r"\[([^\]]+)\]\(https://huggingface\.co/papers/([\d.]+)\)", function.__doc__ or "")
    return None if found is None else Paper(*found.groups())
