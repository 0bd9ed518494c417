# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's names for images and videos; here one maker and one kind of samples serve all modalities."""

from .experience import ExperienceVL
from .experience import Samples as SamplesVL
from .experience_maker import NaiveExperienceMaker as NaiveExperienceMakerVL


__all__ = ["ExperienceVL", "NaiveExperienceMakerVL", "SamplesVL"]
