# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of published benchmarks."""

from .benchmarks import load_avqa, load_geo3k, load_mmau
