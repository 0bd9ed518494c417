# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Devices of the tests."""

import pytest
import torch


# `tests/shims/fake_cuda.py` has neither Triton's kernels nor storages that can be emptied, and one device
IS_STAND_IN = torch.cuda.is_available() and torch.cuda.get_device_name() == "stand-in"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NO_STAND_IN = pytest.mark.skipif(IS_STAND_IN, reason="needs a real GPU")
