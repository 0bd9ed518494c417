# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Devices of the tests."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from packaging.version import Version

from helpers.marks import slow_but


# The stand-in `tests/shims/fake_cuda.py` has one device, no Triton kernels, and no storages that can be emptied
IS_STAND_IN = torch.cuda.is_available() and torch.cuda.get_device_name() == "stand-in"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# A rehearsal (`gpu/rehearse.sh`) runs the tests for GPUs on a CPU
IS_REHEARSAL = "REHEARSAL" in os.environ and not torch.cuda.is_available()
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
GPU_OR_REHEARSAL = [pytest.mark.gpu, *([] if IS_REHEARSAL else GPU)]
# Devices of tests that the stand-in can't run. These tests also run on a CPU, in the slow suite.
GPU_OR_CPU = [
    pytest.param("cuda", marks=GPU),
    pytest.param("cpu", marks=[pytest.mark.slow, *([pytest.mark.gpu] if IS_REHEARSAL else [])]),
]
NO_STAND_IN = pytest.mark.skipif(IS_STAND_IN, reason="needs a real GPU")


def gpu_only(values: Iterable, *kept) -> list:
    """
    Marks all parameters but `kept` as needing a real GPU. On the stand-in, the marked parameters would test nothing
    new: they differ from `kept` only in kernels, or other tests have them.
    """
    return slow_but(values, *kept, mark=NO_STAND_IN)


def gated_backward_obstacle() -> str | None:
    """Returns the reason that flash-linear-attention can't compute gradients of gated layers here, or `None`."""
    libs = {}
    for name in ("flash-linear-attention", "triton", "tilelang"):
        try:
            libs[name] = version(name)
        except PackageNotFoundError:
            pass
    if "flash-linear-attention" not in libs or "triton" not in libs or "tilelang" in libs:
        return None
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if not is_hopper or not Version("3.4.0") <= Version(libs["triton"]) < Version("3.7.1"):
        return None
    return (
        f"on Hopper, flash-linear-attention needs TileLang or Triton 3.7.1 for gradients, not Triton {libs['triton']}"
    )
