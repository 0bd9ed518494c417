# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Counts of the data that ranks exchange."""

from torch.utils._python_dispatch import TorchDispatchMode


class Gathered(TorchDispatchMode):
    """Mode that counts the bytes of whole tensors that this rank gathers from all ranks' shards."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in func.name():
            self.n_bytes += output.nbytes
        return output
