# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of messages with media as inputs of a model's forward, once per prompt."""
