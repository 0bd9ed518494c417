# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's name for the experience maker that samples with an engine; this package has one maker for all."""

from .experience_maker import NaiveExperienceMaker as FastExperienceMaker


__all__ = ["FastExperienceMaker"]
