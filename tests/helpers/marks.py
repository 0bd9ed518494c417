# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Selects the cases of a test for the default run."""

from collections.abc import Iterable, Sequence

import pytest


def slow_but(values: Iterable, *kept, mark: pytest.MarkDecorator = pytest.mark.slow) -> list:
    """Marks all parameters as slow, or in another way, except those to keep."""
    return [
        value if value in kept else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]


def by_turns(cases: Iterable, others: Sequence, mark: pytest.MarkDecorator = pytest.mark.slow) -> list:
    """Combines cases with other values. One combination per case isn't marked, with the values in turn."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), other, marks=[mark] * (j != i % len(others)))
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]
