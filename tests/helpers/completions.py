# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions to score, in groups of a given size."""

import torch


G = 3


def random_completions(n, longest=7, vocab=(50, 200), seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return torch.randint(*vocab, (n, longest), generator=generator) * mask, mask
