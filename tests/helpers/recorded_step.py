# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Capture and replay of a token's step without a GPU: a replay runs the step again and asserts the same operations."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_multimodal_rft.engines.token_loop import GraphedStep


class Operations(TorchDispatchMode):
    """
    Mode that records a step's operations in `calls`, with the facts about arguments that a CUDA graph keeps: the
    address of a tensor from before the step, a mark for a tensor made in the step, and the value of a number or of a
    tensor made of Python's numbers. `overwritten` holds tensors that operations changed, with their previous values.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):  # reads a tensor's value on the host
            raise RuntimeError("operation not permitted when stream is capturing")
        if function is torch.ops.aten.lift_fresh.default:  # a tensor made of Python's numbers
            self._made.add(args[0].untyped_storage().data_ptr())
            self.calls.append((str(function), args[0].tolist()))
        inputs = [*map(self._kept, tree_leaves([args, kwargs or {}]))]
        self.calls.append((str(function), inputs))
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if is_tensor(value) and argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten.append((value, value.clone()))
        output = function(*args, **(kwargs or {}))
        input_addresses = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves([args, kwargs or {}]) if is_tensor(tensor)
        }
        for tensor in filter(is_tensor, tree_leaves(output)):
            address = tensor.untyped_storage().data_ptr()
            if address not in input_addresses:
                self._made.add(address)
        return output

    def _kept(self, value):
        if not is_tensor(value):
            return repr(value)
        place = "made" if value.untyped_storage().data_ptr() in self._made else value.data_ptr()
        return place, tuple(value.shape), value.stride(), value.dtype


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


class RecordedStep(GraphedStep):
    """Step that counts its captures and replays. `instances` lists all steps."""

    instances: "list[RecordedStep]" = []

    def __init__(self, device):
        super().__init__(device)
        self.captures = self.replays = 0
        self.instances.append(self)

    def capture(self, step):
        self._step = step
        self._is_new = True
        self._calls, output = self._run()
        self.captures += 1
        return output

    def replay(self):
        self.replays += 1
        if self._is_new:  # the first replay after a capture, which has already run the step
            self._is_new = False
            return
        calls, output = self._run()
        assert len(calls) == len(self._calls), f"{len(calls)} operations, captured were {len(self._calls)}"
        for call, captured in zip(calls, self._calls, strict=True):
            assert call == captured, f"{call}, captured was {captured}"
        self._output.copy_(output)

    def _run(self):
        state = torch.get_rng_state()
        operations = Operations()
        try:
            with operations:
                output = self._step()
        except Exception:  # restores tensors, since a failed capture on a GPU changes none
            for tensor, value in reversed(operations.overwritten):
                tensor.copy_(value)
            raise
        assert torch.equal(torch.get_rng_state(), state), "a graph of a token draws no random numbers"
        return operations.calls, output
