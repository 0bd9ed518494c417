# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's name of the text policy, [`Actor`]."""

from .actor import Actor as ActorLanguage


__all__ = ["ActorLanguage"]
