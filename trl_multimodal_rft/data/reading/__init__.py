# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From what a row names to images, sounds and frames: sources, limits, formats, decoding."""
