# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checkpoints of trainers: their files, whole or in shards, their manifest, and resuming from them bit for bit."""
