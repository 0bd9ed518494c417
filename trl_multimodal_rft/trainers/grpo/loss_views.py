# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The option `loss_view`: prompts under the view, the dependency of completions on media, and terms of the loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from ...algorithms.entropy import advantage_weights, high_entropy_mask, relevance_weights
from ...algorithms.losses import LossOutput, Normalizer
from ...algorithms.metrics import scored_mean
from ...forward.head import HeadRule, head_rule
from ...forward.scores import Scores
from ...rollout.ranks import local_rows
from ...rollout.rollout import Rollout, require
from ...rollout.score import score_dependency
from ...rollout.view_prompts import view_prompts
from ..shared.stages import Stages
from .method import GRPO


if TYPE_CHECKING:
    from .config import MultimodalGRPOConfig


def dependency_head_rule(model: PreTrainedModel) -> HeadRule:
    """
    Returns the scale and soft cap of a model's LM head, from which divergences are computed. Raises `ValueError` if
    the model applies anything else to its logits.
    """
    rule = head_rule(model)
    if rule is None:
        raise ValueError(
            "`advantage_min` and `token_quantile` of `loss_view` compute distributions over the vocabulary from "
            "hidden states, but what this model does around its LM head is unknown. Use `kl_coef` or `temperature` "
            "instead, which only need log-probabilities and entropies."
        )
    return rule


def add_view(stages: Stages, rollout: Rollout) -> None:
    """Sets a rollout's prompts under `loss_view`, and marks the completions whose prompts the view changes."""
    view = stages.context.args.loss_view_settings.view.seeded(stages.context.args.seed, rollout.step)
    rollout.view.prompts = view_prompts(rollout, view, stages.prompting.encoder)
    pairs = [*zip(rollout.prompts, rollout.view.prompts, strict=True)]
    # `view_prompts` keeps the same object for a prompt that the view doesn't change
    rollout.view.replaces = torch.tensor(
        [clean is not viewed for clean, viewed in pairs], device=stages.context.accelerator.device
    )
    for prompt in rollout.view.prompts:
        prompt.decoded = ()  # no sampler reads prompts under this view


def measure_dependency(
    stages: Stages,
    rollout: Rollout,
    rule: HeadRule | None,
    score: Callable[[Rollout], Scores],
    score_reference: Callable[[Rollout], Scores],
) -> Scores:
    """
    Returns the scores of a rollout under the policy that sampled it, and sets the dependency of its tokens on media,
    `(B, C)`. `score` and `score_reference` score a rollout under the policy and under the reference.

    With the `rule` of the LM head, the dependency is the divergence between the policy's distributions with the media
    and under the view. Without a `rule`, it is the reference's entropy under the view minus the policy's entropy with
    the media. It is 0 where the view replaces no media.
    """
    args = stages.context.args
    has_replacement = require(rollout.view.replaces)[:, None]
    if rule is None:
        old_scores = score(rollout)
        view_scores = score_reference(replace(rollout, prompts=rollout.view.prompts))
        rollout.view.dependency = torch.where(has_replacement, view_scores.entropies - old_scores.entropies, 0)
    else:
        batch_size: int = args.per_device_train_batch_size
        model: Any = stages.context.model
        with torch.no_grad(), disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
            old_scores, rollout.view.dependency = score_dependency(
                stages.scoring.policy, model, rule, rollout, batch_size
            )
    if not args.loss_view_settings.has_gradient:  # updates don't forward the view
        rollout.view.prompts = []
    dependency = scored_mean(rollout.view.dependency.abs(), rollout.loss_mask * has_replacement)
    stages.context.metrics.add({"view/dependency": dependency})
    return old_scores


def weigh_by_dependency(stages: Stages, rollout: Rollout) -> None:
    """
    Weighs completions and tokens by their dependency on media.

    With `advantage_min`, weighs advantages by the mean dependency of a completion's tokens. With `temperature` or
    `token_quantile`, weighs tokens by their own dependency. Weights are 1 where the view replaces no media.
    """
    settings = stages.context.args.loss_view_settings
    dependency = require(rollout.view.dependency)
    mask = rollout.loss_mask
    replaces = require(rollout.view.replaces)
    advantages = require(rollout.advantages)
    if settings.advantage_min is not None:
        mean_dependencies = (dependency * mask).sum(1) / mask.sum(1).clamp(min=1)
        # (N, 2) of all ranks: the mean dependency, and 1 if the completion is to be weighed
        statistics = stages.context.accelerator.gather(
            torch.stack([mean_dependencies, (replaces & mask.any(1)).to(mean_dependencies.dtype)], dim=1)
        )
        completion_weights = advantage_weights(statistics[:, 0], statistics[:, 1] > 0, settings.advantage_min)
        stages.context.metrics.add({"view/weight_max": completion_weights.max().item()})
        local_weights = local_rows(stages.context.accelerator, completion_weights, len(rollout))
        rollout.advantages = advantages * (local_weights if advantages.dim() == 1 else local_weights[:, None])
    token_weights = None
    if settings.temperature is not None:
        token_weights = relevance_weights(dependency, mask, settings.temperature)
    elif settings.token_quantile < 1:
        token_weights = high_entropy_mask(dependency, mask, settings.token_quantile, scope="sequence")
    if token_weights is not None:
        rollout.tokens.weights = torch.where(replaces[:, None], token_weights, 1.0)


def with_view_term(
    output: LossOutput, scores: Scores, inputs: Rollout, args: "MultimodalGRPOConfig", normalizer: Normalizer
) -> LossOutput:
    """Adds the view's terms, averaged like the policy loss, and their metrics to the loss of a micro-batch."""
    mask = inputs.loss_mask
    loss_type = args.loss
    settings = args.loss_view_settings
    # Without scores under the view, the terms that read them have coefficients of 0, so any scores can stand in
    view_scores = scores if scores.view is None else scores.view
    losses, kl = GRPO.terms["loss_view"](
        scores.logps,
        view_scores.logps,
        mask,
        kl_coef=settings.kl_coef,
        kl_clip=settings.kl_clip,
        entropy_coefs=settings.entropy_coefs or (0.0, 0.0),
    )
    metrics = dict(output.metrics)
    if scores.view is not None:
        view_mask = mask * require(inputs.view.replaces)[:, None]
        metrics |= {
            "view/kl": scored_mean(kl, view_mask),
            "view/entropy": scored_mean(view_scores.entropies, view_mask),
        }
    return LossOutput(output.loss + loss_type.average(losses, mask, normalizer), metrics)
