# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of published benchmarks and of other tools' layouts, folders of Parquet, and rules for media."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names


if TYPE_CHECKING:
    from .benchmarks import load_audiomcq, load_avqa, load_mmau
    from .folders import write_folder
    from .layouts import (
        load_charades_sta,
        load_conversations,
        load_deepeyes,
        load_easyr1,
        load_geo3k,
        load_mm_eureka,
        load_verl,
        load_video_r1,
    )
    from .rules import MediaRules

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "load_audiomcq": "benchmarks",
        "load_avqa": "benchmarks",
        "load_charades_sta": "layouts",
        "load_conversations": "layouts",
        "load_deepeyes": "layouts",
        "load_easyr1": "layouts",
        "load_geo3k": "layouts",
        "load_mm_eureka": "layouts",
        "load_mmau": "benchmarks",
        "load_verl": "layouts",
        "load_video_r1": "layouts",
        "MediaRules": "rules",
        "write_folder": "folders",
    },
)
