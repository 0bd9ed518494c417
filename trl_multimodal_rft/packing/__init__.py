# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
from .attention import install_prefix_attention
from .forward import completion_scores, packed_scores, padded_scores
from .layout import PackedRow, PrefixLayout, pack
from .masks import linear_masks, sharing_obstacle
from .scores import Scores
