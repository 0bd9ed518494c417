# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supported versions of TRL, transformers, torch and vLLM, and what the oldest of them lack."""

from functools import lru_cache


@lru_cache
def is_torchcodec_usable() -> bool:
    """Whether torchcodec loads and finds FFmpeg, as `transformers.utils` has it since 5.21."""
    try:
        import torchcodec
    except (ImportError, OSError, RuntimeError):
        return False
    return getattr(torchcodec, "ffmpeg_major_version", True) is not None  # `None` without FFmpeg, since 0.16
