# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of published benchmarks, and rules for media."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:
    from .benchmarks import load_avqa, load_geo3k, load_mmau
    from .rules import MediaRules

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "load_avqa": "benchmarks",
        "load_geo3k": "benchmarks",
        "load_mmau": "benchmarks",
        "MediaRules": "rules",
    },
)
