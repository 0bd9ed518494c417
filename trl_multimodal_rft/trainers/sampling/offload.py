# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Host memory for weights and states that sampling doesn't need."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..base.ema import MovingAverage


# Storages by their addresses in torch, so that tensors that share a storage count once
Storages = dict[int, torch.UntypedStorage]


class HostMemory:
    """
    Host memory, in reused slabs of `slab_size` bytes, for storages while their device memory is freed. A storage is
    resized to 0 and back, as FSDP does, so that all tensors on it stay valid, such as DDP's buckets and optimizer
    states.
    """

    def __init__(self, device: torch.device, slab_size: int = 2**26):
        # The default is a power of two, to which torch rounds pinned memory up
        self.device = device
        self.slab_size = slab_size
        self.slabs: list[torch.Tensor] = []
        self._used = 0  # bytes that open contexts use

    @contextmanager
    @torch.no_grad()
    def offloading(self, storages: Storages) -> Iterator[None]:
        """
        Frees the device memory of storages within the context. Skips storages on other devices, and storages that
        can't be resized, such as memory-mapped files.
        """
        on_device = [
            storage for storage in storages.values() if storage.device.type == self.device.type and storage.resizable()
        ]
        sizes = [storage.nbytes() for storage in on_device]
        used_before = self._used
        try:
            # Pairs of as many bytes on the device and on the host
            copies = [*chain.from_iterable(map(self._host_copies, on_device))]
            _copy([(host, device_part) for device_part, host in copies])
            try:
                for storage in on_device:
                    storage.resize_(0)
                clear_device_cache()  # vLLM can't use memory that torch's cache holds
                yield
            finally:
                for storage, size in zip(on_device, sizes, strict=True):
                    storage.resize_(size)
                _copy(copies)
        finally:
            self._used = used_before

    def _host_copies(self, storage: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """
        Splits the bytes of a storage into parts, and yields each part with as many free bytes of a slab.

        With slabs of 64 bytes, of which 40 bytes are used, a storage of 100 bytes has parts of 24, 64 and 12 bytes.
        """
        # All bytes of the storage as a tensor, without a copy
        remaining = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        while len(remaining):
            slab_index, offset = divmod(self._used, self.slab_size)
            if slab_index == len(self.slabs):
                self.slabs.append(
                    torch.empty(self.slab_size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
                )
            host = self.slabs[slab_index][offset : offset + len(remaining)]
            yield remaining[: len(host)], host
            remaining = remaining[len(host) :]
            self._used += len(host)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair to the first, and waits once for all copies."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    for device in {tensor.device for tensor in chain.from_iterable(pairs) if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def storages(tensors: Iterable[Any]) -> Storages:
    """Returns the storages of tensors, and skips other objects. A sharded tensor has its local shard's storage."""
    by_address: Storages = {}
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            # A sharded or quantized tensor wraps inner tensors
            by_address |= storages(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            by_address[storage._cdata] = storage
    return by_address


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the weights of a model, or with ZeRO-3 this process's part of each weight."""
    for parameter in model.parameters():
        yield getattr(parameter, "ds_tensor", parameter)


def update_states(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Any]:
    """Yields the gradients of a model, and all states of its optimizer, among them objects that aren't tensors."""
    yield from (parameter.grad for parameter in model.parameters())
    while optimizer is not None:
        # DeepSpeed steps with copies in float32, and keeps gradients apart from parameters
        attribute_names = ("param_groups", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
        yield from tree_leaves([getattr(optimizer, name, None) for name in attribute_names])
        yield from tree_leaves([*getattr(optimizer, "state", {}).items()])
        optimizer = getattr(optimizer, "optimizer", None)  # Accelerate and DeepSpeed wrap the optimizer


def idle_storages(
    model: nn.Module,
    optimizer: Optimizer | None,
    reference: nn.Module | None = None,
    average: MovingAverage | None = None,
    critic: nn.Module | None = None,
) -> Storages:
    """
    Returns the storages that sampling doesn't read: of gradients, optimizer states, the reference, the average of the
    weights, and the critic. Leaves out storages that also hold weights of the policy.
    """
    critic_weights = [] if critic is None else [*weights(critic)]
    critic_ids = set(map(id, critic_weights))
    # The critic can be a submodule of the policy, and is idle all the same
    policy_storages = storages(weight for weight in weights(model) if id(weight) not in critic_ids)
    reference_weights = [] if reference is None else [*weights(reference)]
    average_weights = [] if average is None else average.state_dict().values()
    idle = storages([*update_states(model, optimizer), *reference_weights, *average_weights, *critic_weights])
    return {address: storage for address, storage in idle.items() if address not in policy_storages}
