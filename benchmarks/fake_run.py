# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs of models on fake tensors, to measure memory and operations."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import PyTree, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from trl.kernels import chunked_logprob

from trl_multimodal_rft.extras import micro_batch
from trl_multimodal_rft.forward import head, kernels
from trl_multimodal_rft.models.wrapped import replaced


_ATEN = torch.ops.aten


class FakeFloats(TorchDispatchMode):
    """
    Mode in which new floating-point tensors, and tensors computed from them, are fake. Integers, float inputs such as
    pixels, and small float tensors computed from integers stay real.

    Models compute the number of an image's tokens from the values of ids, grids and masks, and from floats computed
    from lengths. `FakeTensorMode` alone hides these values.
    """

    # Largest size at which a float tensor computed from integers stays real, such as lengths of media, or the weights
    # by which Gemma 4 pools patches, from which it computes a mask
    LARGEST_REAL = 2**22

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
                if func is _ATEN._grouped_mm.default and args[0].dtype != torch.bfloat16:
                    # Kernels compute products of experts in any dtype, but torch infers shapes in bfloat16 alone
                    matrices: list[PyTree] = [*args[:2]]
                    halves = [matrix.to(torch.bfloat16) for matrix in matrices]
                    return func(*halves, *args[2:], **kwargs).to(matrices[0].dtype)
                return func(*args, **kwargs)
        if not tensors and func is not _ATEN.linspace.default:  # models read drop rates from `linspace`
            with self.fake:  # allocates nothing; a result that must stay real is computed again below
                result = func(*args, **kwargs)
            if _can_be_fake(result):
                return result
        if not tensors or any(_can_be_fake(tensor) for tensor in tensors):  # real floats, such as pixels, stay real
            return func(*args, **kwargs)
        # All inputs are integers or single floats, so a large float result becomes fake
        return tree_map_only(torch.Tensor, self._as_fake, func(*args, **kwargs))

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.fake.from_tensor(tensor) if _can_be_fake(tensor) and tensor.numel() > self.LARGEST_REAL else tensor

    @staticmethod
    def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replaces boolean masks by indices. A fake mask counts as all ones."""
        mask_free: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                mask = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
                mask_free += mask.nonzero().unbind(1)
            else:
                mask_free.append(index)
        return mask_free


def _tensors(*values: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _can_be_fake(result: PyTree) -> bool:
    """Returns whether a result is a tensor of several floats. Other results always stay real."""
    return isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() > 1


class Watch(micro_batch.Watch):
    """
    Mode that counts floating-point `operations`, too. Torch's `FlopCounterMode` and `MemTracker` return the same
    numbers, but `MemTracker` takes time quadratic in the number of layers.
    """

    def __init__(self, baseline: Iterable[torch.Tensor] = ()):
        super().__init__(baseline)
        self.operations = 0
        # FLOP counters that torch lacks, such as for CPU operators. Torch's counters are looked up when an operator
        # runs, because torch registers some of them on first use.
        self._counters = {
            _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_val, **__: sdpa_flop_count(
                q.shape, *_shapes_with_query_heads(q, k, v)
            ),
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, q, k, v, *_, out_val, **__: (
                sdpa_backward_flop_count(gradient.shape, q.shape, *_shapes_with_query_heads(q, k, v))
            ),
            _ATEN.addmm_: flop_registry[_ATEN.addmm],
            # Products of experts: a row is multiplied by the matrix of one expert
            _ATEN._grouped_mm: lambda a, b, *_, out_val, **__: 2 * a.size(-2) * a.size(-1) * b.size(-1),
        }

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        count = self._counters.get(func._overloadpacket, flop_registry.get(func._overloadpacket))
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


def _shapes_with_query_heads(query: torch.Tensor, *states: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns the shapes of keys and values with as many heads as the query, as counters before torch 2.13 require."""
    return [(state.shape[0], query.shape[1], *state.shape[2:]) for state in states]


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """
    Lets fake tensors on the CPU use the kernels of a GPU within the context: variable-length attention, and an LM head
    that computes logits of labelled tokens alone, tile by tile and in place.
    """

    def add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # As on a GPU, no temporary tensor holds the product
        torch.mm(a, b, out=into.view(a.dtype)[..., : into.size(-1)])

    tiles = {**dict.fromkeys(("_forward_tile", "_backward_tile"), lambda *_, **__: None), "_addmm_fp32": add_product}
    with (
        replaced(kernels, has_varlen_kernel=lambda query: True),
        replaced(head, _selects_labels=lambda device: True),
        replaced(chunked_logprob, **tiles),
    ):
        yield
