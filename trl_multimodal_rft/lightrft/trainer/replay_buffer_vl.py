# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's name for images and videos; here one buffer serves all modalities."""

from .replay_buffer import NaiveReplayBuffer as NaiveReplayBufferVL


__all__ = ["NaiveReplayBufferVL"]
