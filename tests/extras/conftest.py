# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Marks the tests of this folder, which run weekly and with `make test-changed`."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before the marks select
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:  # those of `prepare` run with each change
            item.add_marker(pytest.mark.extras)
