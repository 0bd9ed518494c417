# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Past rollouts, kept for later batches."""

from .replay_buffer import Group, ReplayBuffer, join_groups, split_groups
