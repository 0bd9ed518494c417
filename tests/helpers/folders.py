# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Where the repository and its tests are, so that a test file finds them from any folder."""

from pathlib import Path


TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
