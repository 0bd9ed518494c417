# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checkpoints of trainers, from which runs resume bit for bit, and manifests of their files."""
