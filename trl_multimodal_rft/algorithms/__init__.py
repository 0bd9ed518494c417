# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The mathematics: advantages, losses, KL and entropy as functions of tensors, without models."""
