# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's name for the maker that samples with an engine; here there is one maker."""

from .experience_maker import NaiveExperienceMaker as FastExperienceMaker


__all__ = ["FastExperienceMaker"]
