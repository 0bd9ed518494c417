# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The backward pass of a micro-batch's loss, part by part."""

from contextlib import contextmanager
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from .encoders import leaves_of_graph
from .scores import DeferredParts, lost_gradient_error


def backward_by_parts(
    accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, deferred: DeferredParts, divisor: int = 1
) -> torch.Tensor:
    """
    Runs the backward pass of all parts but the last, for a scalar loss of the joined scores.

    The scores of a part are computed again. A surrogate loss, the sum of these scores times the gradient of the loss
    with respect to them, then has the part's share of the gradient. Returns a scalar with the value of the loss. The
    caller's `backward()` of this scalar runs the last part. `divisor` is the number by which the caller divides the
    loss, such as the number of accumulation steps. Raises a `RuntimeError` if the loss also depends on tensors other
    than the scores, as the gradients of these tensors would be lost.
    """
    leaves = [*chain.from_iterable(outputs.tensors().values() for outputs in deferred.outputs)]
    other_leaves = leaves_of_graph([loss]) - {*leaves}
    if other_leaves:
        raise lost_gradient_error(f"{len(other_leaves)} tensors besides the last scores")
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradient_of_leaf = dict(zip(map(id, leaves), gradients, strict=True))
    surrogate = loss.new_zeros(())
    for index, outputs in enumerate(deferred.outputs):
        is_last = index == len(deferred.outputs) - 1
        with _accumulate(accelerator, model, not is_last):
            surrogate = loss.new_zeros(())
            scores = deferred.recompute(index).tensors()
            for name, leaf in outputs.tensors().items():
                if scores[name].requires_grad:
                    gradient = gradient_of_leaf[id(leaf)]
                    # Surplus parts have no gradient, but must run the collectives of a backward pass
                    surrogate = surrogate + (scores[name] * (0 if gradient is None else gradient)).sum()
            if not is_last:
                # DeepSpeed would divide by the number of accumulation steps once more, after `divisor`
                is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
                accelerator.backward(surrogate / divisor, **({"scale_wrt_gas": False} if is_deepspeed else {}))
    return surrogate - surrogate.detach() + loss.detach()


@contextmanager
def _accumulate(accelerator: Accelerator, model: nn.Module, accumulates: bool):
    if not (accumulates and accelerator.sync_gradients):
        yield
        return
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
