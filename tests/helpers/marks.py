# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which cases of a test are in the default run."""

from collections.abc import Iterable

import pytest


def slow_but(values: Iterable, *kept) -> list:
    """Parameters of which all but the kept ones are in the slow run."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
