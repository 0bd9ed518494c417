# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Past rollouts, kept for later batches."""

from .replay_buffer import SAVED_CLASSES, Group, ReplayBuffer, join_groups, split_groups
from .replay_buffer_utils import (
    BufferItem,
    BufferItemAL,
    BufferItemOmni,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)
