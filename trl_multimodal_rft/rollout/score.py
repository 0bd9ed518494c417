# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scores of rollouts, and importance ratios to the engine that sampled them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from trl.trainer.utils import nanmax, nanmin

from ..forward.scores import Scores
from ..models.critic import Critic, ValueHead
from ..policy import PolicyForward
from .rollout import Rollout


def score_in_batches(policy: PolicyForward, model: nn.Module, rollout: Rollout, size: int) -> Scores:
    """Scores of a rollout, or of a part of it, `size` completions in a forward."""
    places = [range(start, min(start + size, len(rollout))) for start in range(0, len(rollout), size)]
    parts = [
        policy.score(
            model,
            rollout.prompts[place.start : place.stop],
            rollout.completion_ids[place.start : place.stop],
            rollout.completion_mask[place.start : place.stop],
            packed=rollout.packed,
        )
        for place in places
    ]
    return parts[0] if len(parts) == 1 else Scores.join(parts, places)


def score_values(
    policy: PolicyForward,
    model: nn.Module,
    critic: Critic | ValueHead,
    rollout: Rollout,
    size: int,
    cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Values of the states before each completion token, and after completions that were `cut`, 0 after others; `size`
    completions in a forward.

    Shapes: `cut` `(N,)`; returns `(N, C)` and `(N,)`.
    """
    ids, mask, n = rollout.completion_ids, rollout.completion_mask, len(rollout)
    lengths, extended = mask.sum(1, keepdim=True), mask
    if cut is not None:
        # The state after the last token is the one before a further token, whatever that is
        ids, extended = F.pad(ids, (0, 1)), F.pad(mask, (0, 1)).scatter_add(1, lengths, cut[:, None].to(mask.dtype))
    places = [slice(start, start + size) for start in range(0, n, size)]
    values = torch.cat(
        [
            policy.values(model, critic, rollout.prompts[part], ids[part], extended[part], packed=rollout.packed)
            for part in places
        ]
    )
    bootstrap = torch.zeros(n, device=ids.device)
    if cut is not None:
        bootstrap = torch.where(cut, values.gather(1, lengths)[:, 0], 0)
    return torch.where(mask.bool(), values[:, : mask.size(1)], 0), bootstrap


def engine_ratios(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    smallest: float | None = None,
    largest: float | None = None,
) -> torch.Tensor:
    """
    Importance ratios of the policy to the engine, bounded as TRL's `vllm_importance_sampling_mode` says.

    Shapes: `logps`, `sampling_logps` (NaN where the engine returned none), `mask` `(N, C)`; returns `(N, C)`, or
    `(N, 1)` for modes of sequences.
    """
    differences = ((logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        differences = differences.sum(dim=1, keepdim=True)
    ratios = differences.exp()
    if mode.endswith("truncate"):
        return ratios.clamp(min=smallest, max=largest)
    low, high = -math.inf if smallest is None else smallest, math.inf if largest is None else largest
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def engine_correction(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    smallest: float | None,
    largest: float | None,
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]]:
    """
    Importance ratios of the policy to the engine, 1 where the engine returned no log-probability, and TRL's metrics:
    this rank's number, and what combines those of all ranks.

    Shapes: `logps`, `sampling_logps`, `mask` `(N, C)`; returns `(N, C)`, or `(N, 1)` for modes of sequences.
    """
    ratios = engine_ratios(logps, sampling_logps, mask, mode, smallest, largest)
    difference = (logps - sampling_logps).abs()[mask.bool() & ~sampling_logps.isnan()]
    taken = ratios.flatten() if mode.startswith("sequence") else ratios[mask.bool()]
    difference, taken = (each if each.numel() else each.new_zeros(1) for each in (difference, taken))
    name = "sampling/importance_sampling_ratio"
    return ratios, {
        "sampling/sampling_logp_difference/mean": (difference.mean(), torch.mean),
        "sampling/sampling_logp_difference/max": (difference.max(), torch.max),
        f"{name}/min": (taken.min(), nanmin),
        f"{name}/mean": (taken.mean(), torch.nanmean),
        f"{name}/max": (taken.max(), nanmax),
    }
