# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Importance ratios of the policy to the engine that sampled a rollout.

In shapes, `N` is the number of completions, and `C` the number of columns for tokens of completions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..algorithms.metrics import Metric, largest, nan_mean, smallest
from .rollout import Rollout


def engine_ratios(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    smallest: float | None = None,
    largest: float | None = None,
) -> torch.Tensor:
    """
    Returns importance ratios of the policy to the engine, bounded as by TRL's `vllm_importance_sampling_mode`: to the
    bound with `truncate`, to 0 with `mask`. `sampling_logps` are NaN where the engine gave none. `(N, C)`, or `(N, 1)`
    for modes of sequences.
    """
    differences = ((logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        differences = differences.sum(dim=1, keepdim=True)
    ratios = differences.exp()
    if mode.endswith("truncate"):
        return ratios.clamp(min=smallest, max=largest)
    low = -math.inf if smallest is None else smallest
    high = math.inf if largest is None else largest
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def level_conflict(level: str, mode: str, loss_type: str) -> str:
    """
    Returns an error message if a mode has ratios of another level than a loss takes (`"sequence"`, `"token"`, or `""`
    for both), else `""`.
    """
    if mode.startswith(level):
        return ""
    return (
        f"`loss_type={loss_type!r}` needs the importance ratios of "
        f"{'completions' if level == 'sequence' else 'tokens'}; set `vllm_importance_sampling_mode` to "
        f"'{level}_mask' or '{level}_truncate', got {mode!r}."
    )


def rollout_ratios(rollout: Rollout, args: Any) -> torch.Tensor:
    """
    Returns importance ratios of the policy to the sampler of a rollout, `(N, C)` or `(N, 1)`. Raises a `ValueError` if
    the loss takes ratios of another level, as only the rollout says whether a sampler returns log-probabilities.
    """
    mode = args.vllm_importance_sampling_mode
    conflict = level_conflict(args.ratio_level, mode, args.loss_type) if args.ratio_level else ""
    if conflict:
        raise ValueError(conflict)
    return engine_ratios(
        rollout.old_per_token_logps,
        rollout.sampling_per_token_logps,
        rollout.scored_mask,
        mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    )


def engine_metrics(parts: Sequence[Rollout], args: Any) -> dict[str, Metric]:
    """Returns TRL's metrics of differences between policy and engine, and of their ratios, over parts of a rollout."""
    scored_parts = [part if part.rows_to_score is None else part.select(part.rows_to_score) for part in parts]
    logps = torch.cat([part.old_per_token_logps for part in scored_parts])
    engine_logps = torch.cat([part.sampling_per_token_logps for part in scored_parts])
    mask = torch.cat([part.loss_mask for part in scored_parts])
    ratios = torch.cat([rollout_ratios(part, args) for part in scored_parts])
    difference = (logps - engine_logps).abs()[mask.bool() & ~engine_logps.isnan()]
    # Sequence-level modes have one ratio per completion
    loss_ratios = ratios[mask.bool()] if ratios.shape == mask.shape else ratios.flatten()
    prefix = "sampling/importance_sampling_ratio"
    metrics = {
        "sampling/sampling_logp_difference/mean": nan_mean(difference),
        "sampling/sampling_logp_difference/max": largest(difference),
        f"{prefix}/min": smallest(loss_ratios),
        f"{prefix}/mean": nan_mean(loss_ratios),
        f"{prefix}/max": largest(loss_ratios),
    }
    if args.max_staleness > 0:
        low = args.vllm_importance_sampling_clip_min or 0.0
        high = args.vllm_importance_sampling_clip_max or math.inf
        # Ratios out of bounds were set to the bound or to 0, so ratios strictly between the bounds were kept
        is_kept = (loss_ratios > low) & (loss_ratios < high)
        metrics |= {"sampling/importance_sampling_ratio/kept_frac": nan_mean(is_kept.float())}
    return metrics
