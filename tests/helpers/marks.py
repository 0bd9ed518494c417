# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Marks of tests and parameters that some runs leave out."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import product

import pytest


# Tests of the core that name rewards and commands from outside of it, see repository/test_core.py
OUTSIDE = pytest.mark.skipif(
    find_spec("trl_multimodal_rft.rewards.ready") is None, reason="the package has the core alone"
)


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
        for (i, case), (j, other) in product(enumerate(cases), enumerate(others))
    ]
