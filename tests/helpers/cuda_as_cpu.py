# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`cuda_as_cpu.py SCRIPT [arguments]` runs a script whose tensors on "cuda" are made on the CPU, for lack of a GPU."""

import runpy
import sys

import torch
from torch.overrides import TorchFunctionMode


class CudaAsCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with CudaAsCpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
