# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What sampling doesn't need waits in the host's memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .ema import MovingAverage


# Memory of tensors by its address in torch, so that views count once
Storages = dict[int, torch.UntypedStorage]


class HostMemory:
    """
    Host memory that holds the contents of storages while theirs is free. It is allocated once, in slabs of `slab`
    bytes.

    A storage is emptied and allocated again, as FSDP does with gathered weights. So all that refers to it stays valid:
    parameters, views, optimizers, buckets, and flat buffers of engines.
    """

    def __init__(self, device: torch.device, slab: int = 2**26):
        self.device, self.slab = device, slab  # a power of two, to which torch rounds pinned memory up
        self.slabs: list[torch.Tensor] = []
        self._used = 0  # bytes, by the contexts that are open

    @contextmanager
    @torch.no_grad()
    def holding(self, storages: Storages) -> Iterator[None]:
        """
        Frees the device's memory of storages within the context. Those elsewhere stay as they are, and so do those
        that can't be allocated again, such as mapped files.
        """
        held = [each for each in storages.values() if each.device.type == self.device.type and each.resizable()]
        sizes, start = [each.nbytes() for each in held], self._used
        try:
            copies = [pair for each in held for pair in self._host_copies(each)]
            _copy([(host, own) for own, host in copies])
            try:
                for each in held:
                    each.resize_(0)
                clear_device_cache()  # engines have allocators of their own
                yield
            finally:
                for each, size in zip(held, sizes, strict=True):
                    each.resize_(size)
                _copy(copies)
        finally:
            self._used = start

    def _host_copies(self, storage: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of a storage, and those of slabs that hold them."""
        own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        while len(own):
            index, first = divmod(self._used, self.slab)
            if index == len(self.slabs):
                self.slabs.append(torch.empty(self.slab, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            host = self.slabs[index][first : first + len(own)]
            yield own[: len(host)], host
            own = own[len(host) :]
            self._used += len(host)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair to the first, and waits once."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    for device in {tensor.device for pair in pairs for tensor in pair if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def storages(tensors: Iterable[Any]) -> Storages:
    """Memory of tensors among given objects; of sharded ones, that of this process's part."""
    found: Storages = {}
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            found |= storages(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
    return found


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Weights of a model; with ZeRO-3, this process's part of them."""
    for parameter in model.parameters():
        yield getattr(parameter, "ds_tensor", parameter)


def update_states(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Any]:
    """Gradients, and all that the optimizer holds."""
    yield from (parameter.grad for parameter in model.parameters())
    while optimizer is not None:
        # DeepSpeed steps with copies in float32, and keeps gradients apart from parameters
        names = ("param_groups", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
        yield from tree_leaves([getattr(optimizer, name, None) for name in names])
        yield from tree_leaves([*getattr(optimizer, "state", {}).items()])
        optimizer = getattr(optimizer, "optimizer", None)  # which engines wrap


def idle_storages(
    model: nn.Module,
    optimizer: Optimizer | None,
    reference: nn.Module | None = None,
    average: MovingAverage | None = None,
    critic: nn.Module | None = None,
) -> Storages:
    """Memory that only scores and updates read: states, a reference, an average of weights, and a critic."""
    own = [] if critic is None else [*weights(critic)]
    ids = set(map(id, own))
    kept = storages(each for each in weights(model) if id(each) not in ids)  # the critic may be a part of it
    others = [] if reference is None else [*weights(reference)]
    averaged = [] if average is None else average.state_dict().values()
    found = storages([*update_states(model, optimizer), *others, *averaged, *own])
    return {key: storage for key, storage in found.items() if key not in kept}
