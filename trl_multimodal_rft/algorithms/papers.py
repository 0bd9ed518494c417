# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Papers behind functions, read from their docstrings."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, by its title or by the name of its method."""

    title: str
    arxiv_id: str

    @property
    def link(self) -> str:
        """The paper as a link in Markdown."""
        return f"[{self.title}](https://huggingface.co/papers/{self.arxiv_id})"


def cite(paper: Paper | None, *names: str | None) -> str:
    """Returns the names of a method with its paper, for the help of an option."""
    text = " or ".join(repr(name) for name in names if name)
    return text if paper is None else f"{text} ({paper.title})"


def paper_of(function: Callable) -> Paper | None:
    """Returns the first paper that a function's docstring links, or `None` (`python -OO` strips docstrings)."""
    match = re.search(r"\[([^\]]+)\]\(https://huggingface\.co/papers/([\d.]+)\)", function.__doc__ or "")
    return None if match is None else Paper(*match.groups())
