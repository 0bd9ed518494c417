# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Controllers of the KL coefficient, where LightRFT has them."""

from ...algorithms.kl import AdaptiveKLController, FixedKLController


__all__ = ["AdaptiveKLController", "FixedKLController"]
