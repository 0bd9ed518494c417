# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scores of rollouts, and importance ratios of the policy to the engine that sampled them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import nanmax, nanmin

from ..algorithms.metrics import Metric
from ..forward.divergence import Target, head_of
from ..forward.head import HeadRule
from ..forward.scores import ScoreRequest, Scores
from ..models.critic import Critic, ValueHead
from ..policy import PolicyForward
from .ranks import sum_over_ranks
from .rollout import Rollout, require


def score_in_batches(policy: PolicyForward, model: nn.Module, rollout: Rollout, size: int) -> Scores:
    """Returns the scores of a rollout, or of a part of it, in forwards of `size` completions."""
    (prompts, ids, mask), ranges = rollout.completions, rollout.parts(size)
    slices = [slice(indices.start, indices.stop) for indices in ranges]  # slices copy no tensor, unlike `select`
    requests = [ScoreRequest(prompts[rows], ids[rows], mask[rows], rollout.packed) for rows in slices]
    parts = [policy.score(model, request) for request in requests]
    return parts[0] if len(parts) == 1 else Scores.join(parts, ranges)


def score_with_view(
    policy: PolicyForward, model: nn.Module, rollout: Rollout, *, rows: Sequence[int] | None = None, **options: Any
) -> Scores:
    """
    Returns the scores of a micro-batch. If its prompts have views, the field `view` holds the scores of the same
    completions given the prompts under the view.

    One forward computes both, as wrappers such as DDP require. Where the view replaces nothing, both are equal. For
    example, if the view replaces media of completions 1 and 3 of 4, the forward's rows are 0 to 3, and 5 and 7.
    `rows` are the batch indices of the completions to forward, by default all. `options` are further fields of the
    [`~forward.scores.ScoreRequest`].
    """
    (prompts, ids, mask), views, n, packed = rollout.completions, rollout.view.prompts, len(rollout), rollout.packed
    if views:
        replaces = require(rollout.view.replaces)
        scored_rows = [*(range(n) if rows is None else rows), *(n + i for i in replaces.nonzero()[:, 0].tolist())]
        scored_rows = None if len(scored_rows) == 2 * n else scored_rows
        doubled_completions = [*prompts, *views], torch.cat([ids, ids]), torch.cat([mask, mask])
        scores = policy.score(model, ScoreRequest(*doubled_completions, packed, rows=scored_rows, **options))
        plain, view = scores.rows(slice(n)), scores.rows(slice(n, None))
        is_replaced = replaces[:, None]
        plain.view = Scores(
            logps=torch.where(is_replaced, view.logps, plain.logps),
            entropies=torch.where(is_replaced, view.entropies, plain.entropies),
        )
        plain.deferred = scores.deferred
    else:
        plain = policy.score(model, ScoreRequest(prompts, ids, mask, packed, rows=rows, **options))
    if rows is not None and rollout.old_per_token_logps is not None:
        # The old log-probabilities, so that rows that aren't forwarded get a ratio of policy to old policy of 1
        plain.logps = torch.where(rollout.scored_mask.any(1)[:, None], plain.logps, rollout.old_per_token_logps)
    return plain


def score_dependency(
    policy: PolicyForward, model: nn.Module, rule: HeadRule, rollout: Rollout, size: int
) -> tuple[Scores, torch.Tensor]:
    """
    Returns the scores of a rollout, and the KL divergence `(N, C)` between each token's distributions without and with
    the view of its prompt, 0 where the view replaces nothing. Forwards have `size` completions.
    """
    ranges = rollout.parts(size)
    part_scores, dependencies = [], []
    for part in map(rollout.select, ranges):
        prompts, ids, mask = part.completions
        plain = policy.score(model, ScoreRequest(prompts, ids, mask, packed=part.packed, hidden=True))
        head, target_mask = head_of(policy.unwrapped(model), rule), mask * require(part.view.replaces)[:, None]
        target = Target(target_mask, rule, beta=0.0, temperature=policy.temperature, hidden=plain.hidden, head=head)
        view = policy.score(model, ScoreRequest(part.view.prompts, ids, mask, packed=part.packed, target=target))
        dependencies.append(view.divergences)
        plain.hidden = None
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

    Shapes: `is_cut` `(N,)`; returns `(N, C)` and `(N,)`.
    """
    prompts, ids, mask = rollout.completions
    lengths, extended_mask = mask.sum(1, keepdim=True), mask
    if is_cut is not None:
        # The state after the last token is the state before a further token, whose id doesn't matter
        ids, extended_mask = (
            F.pad(ids, (0, 1)),
            F.pad(mask, (0, 1)).scatter_add(1, lengths, is_cut[:, None].to(mask.dtype)),
        )
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    options = {"packed": rollout.packed, "critic": critic, "logps": False}
    scores = [
        policy.score(model, ScoreRequest(prompts[part], ids[part], extended_mask[part], **options)) for part in parts
    ]
    values = torch.cat([part_scores.values for part_scores in scores])
    bootstrap = torch.zeros(len(ids), device=ids.device)
    if is_cut is not None:
        bootstrap = torch.where(is_cut, values.gather(1, lengths)[:, 0], 0)
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
    Returns importance ratios of the policy to the engine, bounded as TRL's `vllm_importance_sampling_mode` says: modes
    with `truncate` set ratios out of bounds to the bound, and modes with `mask` set them to 0.

    Shapes: `logps`, `sampling_logps` (NaN where the engine returned none), `mask` `(N, C)`; returns `(N, C)`, or
    `(N, 1)` for sequence-level modes.
    """
    differences = ((logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        differences = differences.sum(dim=1, keepdim=True)
    ratios = differences.exp()
    if mode.endswith("truncate"):
        return ratios.clamp(min=smallest, max=largest)
    low, high = -math.inf if smallest is None else smallest, math.inf if largest is None else largest
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def rollout_ratios(rollout: Rollout, args: Any) -> torch.Tensor:
    """Returns importance ratios of the policy to the engine that sampled a rollout, `(N, C)` or `(N, 1)`."""
    return engine_ratios(
        require(rollout.old_per_token_logps),
        require(rollout.sampling_per_token_logps),
        rollout.scored_mask,
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    )


def engine_metrics(parts: Sequence[Rollout], args: Any) -> dict[str, Metric]:
    """Returns TRL's metrics of differences between policy and engine, and of their ratios, over parts of a rollout."""
    scored_parts = [part if part.rows_to_score is None else part.select(part.rows_to_score) for part in parts]
    logps = torch.cat([require(part.old_per_token_logps) for part in scored_parts])
    engine_logps = torch.cat([require(part.sampling_per_token_logps) for part in scored_parts])
    mask = torch.cat([part.loss_mask for part in scored_parts])
    ratios = torch.cat([rollout_ratios(part, args) for part in scored_parts])
    difference = (logps - engine_logps).abs()[mask.bool() & ~engine_logps.isnan()]
    loss_ratios = ratios[mask.bool()] if ratios.shape == mask.shape else ratios.flatten()
    difference, loss_ratios = (
        tensor if tensor.numel() else tensor.new_zeros(1) for tensor in (difference, loss_ratios)
    )
    name = "sampling/importance_sampling_ratio"
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max or math.inf
    values = {
        "sampling/sampling_logp_difference/mean": (difference.mean(), torch.mean),
        "sampling/sampling_logp_difference/max": (difference.max(), torch.max),
        f"{name}/min": (loss_ratios.min(), nanmin),
        f"{name}/mean": (loss_ratios.mean(), torch.nanmean),
        f"{name}/max": (loss_ratios.max(), nanmax),
    }
    if args.max_staleness > 0:
        # Ratios out of bounds were set to the bound or to 0, so ratios strictly between the bounds were kept
        kept_share = ((loss_ratios > low) & (loss_ratios < high)).float().mean()
        values |= {"sampling/importance_sampling_ratio/kept_frac": (kept_share, torch.mean)}
    return {name: Metric(value.reshape(1), combine) for name, (value, combine) in values.items()}


def n_on_policy(args: Any, steps_per_rollout: int) -> int:
    """
    Returns the number of on-policy micro-batches of a rollout, which are those before the first update.
    `steps_per_rollout` is `steps_per_generation` times the number of iterations over a rollout.
    """
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    if accumulation % steps_per_rollout == 0:
        return steps
    # If neither `accumulation` nor `steps_per_rollout` divides the other, an update may span two rollouts. Then no
    # micro-batch counts as on-policy.
    return min(steps, accumulation) if steps_per_rollout % accumulation == 0 else 0


def without_gradient(rollout: Rollout) -> list[bool]:
    """Returns whether completions have a policy gradient of exactly 0, as in a group with equal rewards."""
    advantages = require(rollout.advantages)
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    return (~((advantages != 0) & rollout.loss_mask.bool()).any(1)).tolist()


def packing_metrics(
    policy: PolicyForward, model: PreTrainedModel, micro_batches: Sequence[Rollout]
) -> dict[str, float]:
    """
    Returns two shares over all ranks: prompt tokens that aren't forwarded because completions share a prompt, and
    completions that aren't forwarded because they have no gradient.
    """
    n_unshared = [
        sum(len(context) for prompt in part.prompts for context in prompt.contexts) for part in micro_batches
    ]
    n_forwarded = [
        policy.n_prompt_tokens(model, part.prompts, part.completion_mask.sum(1).tolist()) if part.packed else n
        for part, n in zip(micro_batches, n_unshared, strict=True)
    ]
    n_skipped = sum(sum(part.tokens.without_gradient) for part in micro_batches)
    counts = [sum(n_forwarded), sum(n_unshared), n_skipped, sum(map(len, micro_batches))]
    n_forwarded, n_unshared, n_skipped, n = sum_over_ranks(policy.accelerator, counts)
    return {"packing/shared_frac": 1 - n_forwarded / n_unshared, "packing/skipped_frac": n_skipped / n}
