# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A loss of a whole micro-batch, differentiated part by part."""

import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from .scores import Scores


class DeferredParts:
    """
    Scores of parts of a micro-batch, without the activations that made them.

    A loss can be computed from [`joined`] as from scores of the whole, and [`backward_by_parts`] then makes each part
    once more for its gradient.

    Args:
        score (`Callable`):
            Called with the index of a part and its rows; returns their [`~forward.scores.Scores`].
        parts (`list[list[int]]`):
            Rows of each part.
        n_parts (`int`):
            Number of parts over all processes, which run equally many forwards. Surplus ones repeat the last.
        device (`torch.device`):
            Whose random numbers the forwards use, beside those of the CPU.
    """

    def __init__(self, score: Callable, parts: list[list[int]], n_parts: int, device: torch.device):
        start = time.perf_counter()
        self.score = score
        self.parts = parts + parts[-1:] * (n_parts - len(parts))
        self.n_own = len(parts)
        self._random = None if device.type == "cpu" else torch.get_device_module(device)
        self._states = []
        self.outputs: list[Scores] = []
        for index, part in enumerate(self.parts):
            self._states.append((torch.get_rng_state(), self._random and self._random.get_rng_state()))
            with torch.no_grad():
                scores = score(index, part)
            self.outputs.append(scores.map(lambda value: value.detach().requires_grad_()))
        self.seconds = time.perf_counter() - start  # that these forwards took, which come on top

    def joined(self) -> Scores:
        """
        The scores in the order of the rows.

        Returns:
            [`~forward.scores.Scores`]: What one call for all rows would return.
        """
        scores = Scores.join(self.outputs[: self.n_own], self.parts[: self.n_own])
        scores.deferred = self
        return scores

    def again(self, index: int) -> Scores:
        """
        Makes a part once more, with a gradient and the same random numbers.

        Args:
            index (`int`):
                Which part.

        Returns:
            [`~forward.scores.Scores`]: Its scores.
        """
        cpu, device = self._states[index]
        torch.set_rng_state(cpu)
        if self._random is not None:
            self._random.set_rng_state(device)
        return self.score(index, self.parts[index])


def backward_by_parts(
    accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, deferred: DeferredParts, divisor: int = 1
) -> torch.Tensor:
    """
    Runs the backward pass of all parts but the last.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the model.
        model (`torch.nn.Module`):
            Model as prepared by it.
        loss (`torch.Tensor`):
            Loss, a scalar, from the joined scores.
        deferred ([`DeferredParts`]):
            The parts.
        divisor (`int`, *optional*, defaults to `1`):
            What the caller divides the result by before its backward pass, such as the number of accumulation steps.

    Returns:
        `torch.Tensor`: A scalar with the value of the loss, whose backward pass is that of the last part.
    """
    leaves = [leaf for outputs in deferred.outputs for leaf in outputs.tensors().values()]
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
                    # Nothing depends on surplus parts, but they have a backward pass like the others
                    surrogate = surrogate + (scores[name] * (0 if gradient is None else gradient)).sum()
            if not last:
                engine = accelerator.distributed_type == DistributedType.DEEPSPEED
                accelerator.backward(surrogate / divisor, **({"scale_wrt_gas": False} if engine else {}))
    return surrogate - surrogate.detach() + loss.detach()


@contextmanager
def _accumulating(accelerator: Accelerator, model: nn.Module, active: bool):
    """No reduction of gradients and no optimizer step within the context, unless that is so outside already."""
    if not (active and accelerator.sync_gradients):
        yield
        return
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
