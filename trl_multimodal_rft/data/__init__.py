# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of published benchmarks and of other tools' layouts, a writer of Parquet folders, and rules for media."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .reading.rules import MediaRules
    from .rows.benchmarks import load_audiomcq, load_avqa, load_mmau
    from .rows.folders import write_folder
    from .rows.layouts import (
        load_conversations,
        load_easyr1,
        load_geo3k,
        load_preferences,
        load_verl,
        load_video_r1,
    )
    from .rows.pairs import judge_rows

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".reading.rules": ["MediaRules"],
        ".rows.benchmarks": ["load_audiomcq", "load_avqa", "load_mmau"],
        ".rows.folders": ["write_folder"],
        ".rows.layouts": [
            "load_conversations",
            "load_easyr1",
            "load_geo3k",
            "load_preferences",
            "load_verl",
            "load_video_r1",
        ],
        ".rows.pairs": ["judge_rows"],
    },
)
