# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random numbers of transforms that depend neither on the process that reads a row nor on when it reads it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds Python, NumPy and torch (on the CPU) by some numbers, and restores their random states on exit."""
    python_seed, numpy_seed, torch_seed = np.random.SeedSequence(numbers).generate_state(3).tolist()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):  # a forked process can't access the states of GPUs
            random.seed(python_seed)
            np.random.seed(numpy_seed)
            torch.default_generator.manual_seed(torch_seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
