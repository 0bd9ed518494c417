# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Marks of parameters that the default run leaves out."""

from collections.abc import Iterable, Sequence

import pytest


def slow_but(values: Iterable, *kept, mark: pytest.MarkDecorator = pytest.mark.slow) -> list:
    """Marks all parameters as slow, or with another mark, except `kept`."""
    return [
        value if value in kept else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]


def by_turns(cases: Iterable, others: Sequence, mark: pytest.MarkDecorator = pytest.mark.slow) -> list:
    """Combines cases with others. One combination per case isn't marked: of 1, 2, 3 and a, b, those are 1a, 2b, 3a."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), other, marks=[mark] * (j != i % len(others)))
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]
