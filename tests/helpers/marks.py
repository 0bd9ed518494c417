# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Selects the cases of a test for the default run."""

from collections.abc import Iterable

import pytest


def slow_but(values: Iterable, *kept) -> list:
    """Marks all parameters as slow, except those to keep."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
