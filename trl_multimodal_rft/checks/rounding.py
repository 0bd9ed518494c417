# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Limits of the differences of log-probabilities that rounding explains.

In float32, the limit is a constant. In half precision, it depends on the model: logits between 16 and 32 are multiples
of 0.125 in bfloat16, and each kernel leaves its own noise in hidden states. So the noise is measured: one forward is
repeated while token embeddings and the inputs of encoders are each rounded up or down at random, which changes all
roundings that follow. A token's noise is the standard deviation of the difference of two repeats.

The repeats run the computation that scores are compared with, such as the model's own forward on one prompt, so they
hold no padding, packing or other prompts. Wrong media or positions shift all repeats alike, and dropout draws the same
numbers in each repeat. So the defects that the self-check looks for don't increase the noise, and can't hide behind
it.

A token's limit is the constant, or two rounding steps at the largest logit if they are more, plus `NOISE_FACTOR` times
the token's noise. The two steps are for logits midway between two numbers of the dtype. Two computations may round
such a logit differently, but too rarely for the repeats to show it.

A comparison fails if one token is off by twice its limit, if two tokens are off by more than their limits, or if the
root mean square over all tokens exceeds the constant (or the two steps) plus half of `NOISE_FACTOR` times the root
mean square of the noise. A single token may be an outlier, for instance near the border between two experts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.parts import find_towers


# Number of forwards that measure the noise
_N_REPEATS = 10

# With this factor, rounding alone fails fewer than 1 of 10,000 checks. This holds even if both completions are the
# same, so that an outlier counts twice.
NOISE_FACTOR = 4


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns the constant limit of a difference of log-probabilities. In float32, it is the only limit."""
    # Scores are computed in float32 at best, even for a model in float64
    return 2 * max(torch.finfo(precision).eps for precision in (dtype, torch.float32)) ** 0.5


STRICT = tolerance_of(torch.float32)


def two_steps(dtype: torch.dtype, logit: float) -> float:
    """Returns twice the distance between neighboring numbers of a dtype around a logit."""
    return 2 * torch.finfo(dtype).eps * 2 ** math.floor(math.log2(max(logit, 1.0)))


def exceeds_rounding(differences: torch.Tensor, noise: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Returns `(...)`, whether the differences of tokens `(..., N)` are larger than rounding explains."""
    excess = differences.abs() / (tolerance + NOISE_FACTOR * noise)
    largest, second = nn.functional.pad(excess, (0, 2)).topk(2).values.unbind(-1)
    rms_difference, rms_noise = (values.square().mean(-1).sqrt() for values in (differences, noise))
    return (largest > 2) | (second > 1) | (rms_difference > tolerance + NOISE_FACTOR / 2 * rms_noise)


def noise_of(repeats: torch.Tensor) -> torch.Tensor:
    """Returns the noise of a difference of log-probabilities, `(..., N)`, from `R` repeats, `(R, ..., N)`."""
    # A difference of two repeats has twice the variance of one
    variance = 2 * repeats.var(0)
    # A few repeats may underestimate the variance of one token, but not the mean over all tokens
    return variance.maximum(variance.mean(-1, keepdim=True)).sqrt().nan_to_num(nan=0.0, posinf=0.0)


def measure_noise(
    model: PreTrainedModel, dtype: torch.dtype, score: Callable[[], torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """Returns the noise `(B, N)` of a difference of `score`'s log-probabilities in a dtype, 0 where the mask is 0."""
    repeats = []
    devices = [mask.device] if mask.device.type == "cuda" else []
    for seed in range(_N_REPEATS):
        with torch.random.fork_rng(devices=devices), perturbed_inputs(model, dtype, seed):
            repeats.append(score()[mask.bool()])
    noise = torch.zeros(mask.shape, device=mask.device)
    return noise.masked_scatter(mask.bool(), noise_of(torch.stack(repeats)).float())


@contextmanager
def perturbed_inputs(model: PreTrainedModel, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Multiplies token embeddings and inputs of encoders by random factors, from 1 - eps / 2 to 1 + eps / 2."""
    half_step = torch.finfo(dtype).eps / 2
    generators = {}

    def perturb(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value  # flags, indices and masks stay as they are
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        uniform = torch.rand(value.shape, generator=generators[value.device], device=value.device)
        return (value * (1 + half_step * (2 * uniform - 1))).to(value.dtype)

    def perturb_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(map(perturb, args)), {name: perturb(value) for name, value in kwargs.items()}

    with ExitStack() as hooks:
        embeddings = model.get_input_embeddings()
        hooks.enter_context(embeddings.register_forward_hook(lambda module, args, output: perturb(output)))
        for name in find_towers(model).values():
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(perturb_inputs, with_kwargs=True))
        yield
