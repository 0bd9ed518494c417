# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of models on fake tensors, to measure memory and operations."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import PyTree, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from trl.kernels import chunked_logprob

from ..forward import head, kernels
from ..models.wrapped import replaced


_ATEN = torch.ops.aten


class FakeFloats(TorchDispatchMode):
    """
    Mode that makes new floating-point tensors, and what is computed from them, fake. Integers, real floats such as
    pixels, and small floats that are computed from integers stay real.

    Models read ids, grids and masks to count the features of an image, and read floats that they compute from lengths.
    Under `FakeTensorMode` alone, such models don't run.
    """

    LENGTHS = 1024  # floats computed from integers, such as lengths of media, stay real up to this size

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        kwargs = kwargs or {}
        tensors = _tensors(args, kwargs)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func in (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default):
                args = (args[0], self._without_masks(args[1]), *args[2:])
            with self.fake:
                return func(*args, **kwargs)
        if not tensors and func is not _ATEN.linspace.default:  # models read its values, as rates of layers
            with self.fake:  # allocates nothing; results that aren't floats are small, and made again for real
                result = func(*args, **kwargs)
            if _is_hidden(result):
                return result
        if not tensors or any(_is_hidden(tensor) for tensor in tensors):  # real floats, such as pixels, stay real
            return func(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._hide, func(*args, **kwargs))

    def _hide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor in place of a large one of floats."""
        return self.fake.from_tensor(tensor) if _is_hidden(tensor) and tensor.numel() > self.LENGTHS else tensor

    @staticmethod
    def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns indices in place of boolean masks; a fake mask counts as all ones."""
        plain: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                mask = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
                plain += mask.nonzero().unbind(1)
            else:
                plain.append(index)
        return plain


def _tensors(*values: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_hidden(result: PyTree) -> bool:
    """Returns whether a result, real or fake, is a tensor of several floats, which may become fake."""
    return isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() > 1


class Watch(TorchDispatchMode):
    """
    Mode that counts bytes of the live storages that were created within the context, `now` and at the `peak`, and
    floating-point `operations`.

    On a GPU, `torch.cuda.memory_allocated` and `torch.cuda.max_memory_allocated` grow by these bytes. Torch's
    `MemTracker` and `FlopCounterMode` agree; the time of the first is quadratic in the number of layers.
    """

    def __init__(self, baseline: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.now = self.peak = self.operations = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in baseline}
        # Counters that torch lacks, such as those of the CPU's operators. Torch's are looked up when an operator runs,
        # as torch registers some of them on first use.
        self._counters = {
            _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_val, **__: sdpa_flop_count(
                q.shape, *_of_all_heads(q, k, v)
            ),
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, q, k, v, *_, out_val, **__: (
                sdpa_backward_flop_count(gradient.shape, q.shape, *_of_all_heads(q, k, v))
            ),
            _ATEN.addmm_: flop_registry[_ATEN.addmm],
        }

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        kwargs = kwargs or {}
        input_storages = {tensor.untyped_storage()._cdata for tensor in _tensors(args, kwargs)}
        result = func(*args, **kwargs)
        count = self._counters.get(func._overloadpacket, flop_registry.get(func._overloadpacket))
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=result)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in input_storages and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _of_all_heads(query: torch.Tensor, *states: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns shapes of keys and values with as many heads as the query; torch before 2.13 takes no fewer heads."""
    return [(state.shape[0], query.shape[1], *state.shape[2:]) for state in states]


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """
    Lets fake tensors on the CPU use the kernels of a GPU within the context: variable-length attention, and an LM head
    that computes logits of labelled tokens alone, tile by tile and in place.
    """

    def add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # A GPU needs no temporary tensor for the product, either
        torch.mm(a, b, out=into.view(a.dtype)[..., : into.size(-1)])

    tiles = {**dict.fromkeys(("_forward_tile", "_backward_tile"), lambda *_, **__: None), "_addmm_fp32": add_product}
    with (
        replaced(kernels, has_varlen_kernel=lambda query: True),
        replaced(head, _has_kernel=lambda device: True),
        replaced(chunked_logprob, **tiles),
    ):
        yield
