# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests of GPU computation (`make test-gpu`). They run on the CPU, too (`make test-slow`)."""

import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.devices import GPU


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

# Must precede the start of CUDA. Otherwise cuBLAS may sum in another order each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), pytest.param("cpu", marks=pytest.mark.slow)])
def device(request, monkeypatch):
    """Returns the device, with float32 matrix products in full precision."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cuda.matmul.allow_tf32
    return request.param
