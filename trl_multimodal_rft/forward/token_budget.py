# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A loss of a whole micro-batch, differentiated part by part."""

import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from .features import leaves_of_graph
from .scores import Scores


class DeferredParts:
    """
    Scores of parts of a micro-batch, without the activations that produced them.

    A loss is computed from [`joined`] as from scores of the whole; [`backward_by_parts`] then recomputes each part for
    its gradient. `score` takes the index of a part and its rows and returns their [`~forward.scores.Scores`]. All
    ranks run `n_parts` forwards: surplus ones repeat the last. `device` has the random state to restore, besides the
    CPU's.
    """

    def __init__(self, score: Callable, parts: list[list[int]], n_parts: int, device: torch.device):
        start = time.perf_counter()
        self.score = score
        self.parts = parts + parts[-1:] * (n_parts - len(parts))
        self.n_local = len(parts)
        self._random = None if device.type == "cpu" else torch.get_device_module(device)
        self._states = []
        self.outputs: list[Scores] = []
        for index, part in enumerate(self.parts):
            self._states.append((torch.get_rng_state(), self._random and self._random.get_rng_state()))
            with torch.no_grad():
                scores = score(index, part)
            self.outputs.append(scores.map(_leaf))
        self.seconds = time.perf_counter() - start  # of these additional forwards

    def joined(self) -> Scores:
        """Scores in the order of the rows, as one call for all rows would return them."""
        scores = Scores.join(self.outputs[: self.n_local], self.parts[: self.n_local])
        scores.deferred = self
        return scores

    def again(self, index: int) -> Scores:
        """Recomputes a part, with a gradient and the same random numbers."""
        cpu, device = self._states[index]
        torch.set_rng_state(cpu)
        if self._random is not None:
            self._random.set_rng_state(device)
        return self.score(index, self.parts[index])


def _leaf(value: torch.Tensor) -> torch.Tensor:
    """A score for the loss. `backward()` of this would end at the score, in silence."""

    def refuse(leaf: torch.Tensor) -> None:
        raise _error("a score")

    leaf = value.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(refuse)  # which `torch.autograd.grad` doesn't call
    return leaf


def _error(where: str) -> RuntimeError:
    return RuntimeError(
        f"The gradient of {where} would be lost, as `max_tokens_per_microbatch` splits the scores of a micro-batch: "
        "compute the loss from one call of the trainer's `_score`, or call `backward_by_parts` with the scores' "
        "`deferred` in place of `backward()`, or set `max_tokens_per_microbatch=None`."
    )


def backward_by_parts(
    accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, deferred: DeferredParts, divisor: int = 1
) -> torch.Tensor:
    """
    Runs the backward pass of all parts but the last, for a scalar loss of the joined scores.

    Returns a scalar with the value of the loss, whose backward pass is that of the last part. `divisor` is what the
    caller divides it by, such as the number of accumulation steps. Raises a `RuntimeError` where the loss has a
    gradient of anything but the scores, which would be lost.
    """
    leaves = [leaf for outputs in deferred.outputs for leaf in outputs.tensors().values()]
    if others := leaves_of_graph([loss]) - {*leaves}:
        raise _error(f"{len(others)} tensors besides the last scores")
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    by_leaf = dict(zip(map(id, leaves), gradients, strict=True))
    surrogate = loss.new_zeros(())
    for index, outputs in enumerate(deferred.outputs):
        last = index == len(deferred.outputs) - 1
        with _accumulating(accelerator, model, not last):
            surrogate = loss.new_zeros(())
            scores = deferred.again(index).tensors()
            for name, leaf in outputs.tensors().items():
                if scores[name].requires_grad:
                    gradient = by_leaf[id(leaf)]
                    # Surplus parts have no gradient, but the collectives of a backward pass
                    surrogate = surrogate + (scores[name] * (0 if gradient is None else gradient)).sum()
            if not last:
                engine = accelerator.distributed_type == DistributedType.DEEPSPEED
                accelerator.backward(surrogate / divisor, **({"scale_wrt_gas": False} if engine else {}))
    return surrogate - surrogate.detach() + loss.detach()


@contextmanager
def _accumulating(accelerator: Accelerator, model: nn.Module, active: bool):
    """Disables the reduction of gradients and the optimizer step, unless they are disabled already."""
    if not (active and accelerator.sync_gradients):
        yield
        return
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
