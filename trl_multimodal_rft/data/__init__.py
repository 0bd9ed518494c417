# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows and media of datasets: rules, columns, reading. Loaders of other tools' rows stand in `extras.prepare`."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from ..extras.prepare.benchmarks import load_avqa, load_mmau
    from ..extras.prepare.folders import write_folder
    from ..extras.prepare.layouts import (
        load_avqa_r1,
        load_conversations,
        load_easyr1,
        load_geo3k,
        load_preferences,
        load_verl,
    )
    from ..extras.prepare.speech import load_speech
    from .reading.rules import MediaRules
    from .rows.pairs import judge_rows

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".reading.rules": ["MediaRules"],
        "..extras.prepare.benchmarks": ["load_avqa", "load_mmau"],
        "..extras.prepare.folders": ["write_folder"],
        "..extras.prepare.layouts": [
            "load_avqa_r1",
            "load_conversations",
            "load_easyr1",
            "load_geo3k",
            "load_preferences",
            "load_verl",
        ],
        "..extras.prepare.speech": ["load_speech"],
        ".rows.pairs": ["judge_rows"],
    },
)
