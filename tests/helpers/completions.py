# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random completions to score, and the number of completions per prompt."""

import torch


G = 3  # completions per prompt


def random_completions(n, longest=7, vocab=(50, 200), seed=0):
    """Returns ids and mask `(n, longest)` of completions of 1 to `longest` tokens, padded with 0 on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return torch.randint(*vocab, (n, longest), generator=generator) * mask, mask
