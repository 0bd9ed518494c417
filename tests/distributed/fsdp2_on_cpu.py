# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Enables FSDP2 without a GPU. FSDP2 runs over gloo, but accelerate supports it on accelerators only."""

import functools

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def enable_fsdp2_on_cpu() -> None:
    """Makes accelerate use an FSDP plugin on the CPU. By default it ignores the plugin and trains with DDP."""
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
