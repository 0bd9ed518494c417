# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Papers behind functions, read from their docstrings."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """
    A paper.

    Args:
        title (`str`):
            Its title, or the name of its method.
        number (`str`):
            Its number on arXiv.
    """

    title: str
    number: str

    @property
    def link(self) -> str:
        """In Markdown."""
        return f"[{self.title}](https://huggingface.co/papers/{self.number})"


def paper_of(function: Callable) -> Paper | None:
    """
    The first paper that a docstring links.

    Args:
        function (`Callable`):
            The function.

    Returns:
        [`Paper`] or `None`: The paper; `None` where there is none, as when Python strips docstrings (`-OO`).
    """
    found = re.search(r"\[([^\]]+)\]\(https://huggingface\.co/papers/([\d.]+)\)", function.__doc__ or "")
    return None if found is None else Paper(*found.groups())
