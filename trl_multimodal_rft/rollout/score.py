# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Scores of a rollout by the policy, by its values and by its dependency on media.

In shapes, `N` is the number of completions, and `C` the number of columns for tokens of completions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..forward.divergence import Target, head_of
from ..forward.head import HeadRule
from ..forward.scores import ScoreRequest, Scores
from ..models.critic import Critic, ValueHead
from ..policy import PolicyForward
from .rollout import Rollout


def score_in_batches(policy: PolicyForward, model: nn.Module, rollout: Rollout, size: int) -> Scores:
    """Returns the scores of a rollout, or of a part of it, in forwards of `size` completions."""
    request = rollout.request()
    ranges = rollout.parts(size)
    parts = [policy.score(model, _rows_of(request, slice(rows.start, rows.stop))) for rows in ranges]
    return parts[0] if len(parts) == 1 else Scores.join(parts, ranges)


def score_with_view(
    policy: PolicyForward, model: nn.Module, rollout: Rollout, *, rows: Sequence[int] | None = None, **options: Any
) -> Scores:
    """
    Returns the scores of a micro-batch; if prompts have views, `view` holds those of the same completions under it,
    from the same forward, as wrappers such as DDP require. Completions whose media a view leaves alone are forwarded
    once. `options` are fields of the [`~forward.scores.ScoreRequest`].
    """
    views = rollout.view.prompts
    n = len(rollout)
    if views:
        replaces = rollout.view.replaces
        scored_rows = [*(range(n) if rows is None else rows), *(n + i for i in replaces.nonzero()[:, 0].tolist())]
        scored_rows = None if len(scored_rows) == 2 * n else scored_rows  # `None` forwards all rows
        prompts, ids, mask = rollout.completions
        doubled = {"prompts": [*prompts, *views], "ids": torch.cat([ids, ids]), "mask": torch.cat([mask, mask])}
        scores = policy.score(model, replace(rollout.request(rows=scored_rows, **options), **doubled))
        plain = scores.rows(slice(n))
        view_scores = scores.rows(slice(n, None))
        is_replaced = replaces[:, None]
        plain.view = Scores(
            logps=torch.where(is_replaced, view_scores.logps, plain.logps),
            entropies=torch.where(is_replaced, view_scores.entropies, plain.entropies),
        )
        plain.deferred = scores.deferred
    else:
        plain = policy.score(model, rollout.request(rows=rows, **options))
    if rows is not None and rollout.old_per_token_logps is not None:
        # The old log-probabilities, so that rows that aren't forwarded get a ratio of policy to old policy of 1. The
        # first forward has none yet, and the zeros of these rows become the old ones
        plain.logps = torch.where(rollout.scored_mask.any(1)[:, None], plain.logps, rollout.old_per_token_logps)
    return plain


def score_dependency(
    policy: PolicyForward, model: nn.Module, rule: HeadRule, rollout: Rollout, size: int
) -> tuple[Scores, torch.Tensor]:
    """
    Returns the scores of a rollout, and the KL divergence between a token's distributions without and under the view,
    `(N, C)`, 0 where it replaces nothing. Forwards have `size` completions.
    """
    ranges = rollout.parts(size)
    part_scores = []
    dependencies = []
    for part in map(rollout.select, ranges):
        plain = policy.score(model, part.request(hidden=True))
        head = head_of(policy.unwrapped(model), rule)
        target_mask = part.completion_mask * part.view.replaces[:, None]
        target = Target(target_mask, rule, beta=0.0, temperature=policy.temperature, hidden=plain.hidden, head=head)
        scores = policy.score(model, replace(part.request(target=target), prompts=part.view.prompts))
        dependencies.append(scores.divergences)
        plain.hidden = None  # frees its memory before the next part
        part_scores.append(plain)
    return Scores.join(part_scores, ranges), torch.cat(dependencies)


def score_values(
    policy: PolicyForward,
    model: nn.Module,
    critic: Critic | ValueHead,
    rollout: Rollout,
    size: int,
    is_cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the value of the state before each completion token, and the value of the state after each completion
    that was cut off (`is_cut`), or 0 for other completions. Forwards have `size` completions.

    For a completion of 2 tokens that was cut off, the critic scores 3 states: before each token, and after the last.

    Shapes: `is_cut` `(N,)`; returns `(N, C)` and `(N,)`.
    """
    request = rollout.request(critic=critic, logps=False)
    mask = request.mask
    lengths = mask.sum(1, keepdim=True)
    if is_cut is not None:
        # The state after the last token is the state before a further token, whose id doesn't matter
        extended_mask = F.pad(mask, (0, 1)).scatter_add(1, lengths, is_cut[:, None].to(mask.dtype))
        request = replace(request, ids=F.pad(request.ids, (0, 1)), mask=extended_mask)
    parts = [slice(start, start + size) for start in range(0, len(request), size)]
    values = torch.cat([policy.score(model, _rows_of(request, part)).values for part in parts])
    bootstrap = torch.zeros(len(request), device=mask.device)
    if is_cut is not None:
        bootstrap = torch.where(is_cut, values.gather(1, lengths)[:, 0], 0)
    return torch.where(mask.bool(), values[:, : mask.size(1)], 0), bootstrap


def _rows_of(request: ScoreRequest, rows: slice) -> ScoreRequest:
    """A slice copies no tensor, unlike indices."""
    return replace(request, prompts=request.prompts[rows], ids=request.ids[rows], mask=request.mask[rows])
