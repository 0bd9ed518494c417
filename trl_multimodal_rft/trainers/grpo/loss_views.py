# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The option `loss_view`: prompts under the view, the dependency of completions on media, and terms of the loss."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from ...algorithms.entropy import advantage_weights, high_entropy_mask, relevance_weights
from ...algorithms.losses import LossOutput, Normalizer, view_term
from ...algorithms.metrics import largest, scored_mean
from ...forward.head import HeadRule, head_rule
from ...forward.scores import Scores
from ...rollout.ranks import local_rows
from ...rollout.rollout import Rollout, ViewScores
from ...rollout.score import score_dependency
from ...rollout.view_prompts import view_prompts
from ..sampling.context import Context
from ..sampling.prompting import Prompting
from ..sampling.scoring import Scoring


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


def with_view(prompting: Prompting, rollout: Rollout) -> Rollout:
    """Returns a rollout with its prompts under `loss_view`, and marks of the completions whose prompts it changes."""
    args = prompting.context.args
    view = args.loss_view_settings.view.seeded(args.seed, rollout.step)
    prompts = view_prompts(rollout, view, prompting.encoder)
    # `view_prompts` keeps the same object for a prompt that the view doesn't change
    replaces = [clean is not viewed for clean, viewed in zip(rollout.prompts, prompts, strict=True)]
    for prompt in prompts:
        prompt.decoded = ()  # no sampler reads prompts under this view
    device = prompting.context.accelerator.device
    return replace(rollout, view=ViewScores(prompts, torch.tensor(replaces, device=device)))


def measure_dependency(scoring: Scoring, rollout: Rollout, rule: HeadRule | None) -> tuple[Scores, Rollout]:
    """
    Returns the scores of a rollout under the policy that sampled it, and the rollout with its tokens' dependency on
    media, `(B, C)`, 0 where the view replaces none: with the head's `rule` the divergence of both distributions, else
    the reference's entropy under the view minus the policy's.
    """
    context = scoring.context
    args = context.args
    model: Any = context.model
    has_replacement = rollout.view.replaces[:, None]
    if rule is None:
        old_scores = scoring.score(model, rollout)
        view_scores = scoring.by_reference(replace(rollout, prompts=rollout.view.prompts))
        dependency = torch.where(has_replacement, view_scores.entropies - old_scores.entropies, 0)
    else:
        with torch.no_grad(), disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
            size = args.per_device_train_batch_size
            old_scores, dependency = score_dependency(scoring.policy, model, rule, rollout, size)
    # Without a gradient, updates don't forward the view
    prompts = rollout.view.prompts if args.loss_view_settings.has_gradient else []
    rollout = replace(rollout, view=replace(rollout.view, prompts=prompts, dependency=dependency))
    context.metrics.add({"view/dependency": scored_mean(dependency.abs(), rollout.loss_mask * has_replacement)})
    return old_scores, rollout


def weighed_by_dependency(context: Context, rollout: Rollout) -> Rollout:
    """
    Returns a rollout weighed by the dependency on media: advantages with `advantage_min`, by the mean of a
    completion's tokens, and tokens with `temperature` or `token_quantile`. Weights are 1 where the view replaces none.
    """
    settings = context.args.loss_view_settings
    dependency = rollout.view.dependency
    mask = rollout.loss_mask
    replaces = rollout.view.replaces
    if settings.advantage_min is not None:
        advantages = rollout.advantages
        mean_dependencies = (dependency * mask).sum(1) / mask.sum(1).clamp(min=1)
        # (N, 2) of all ranks: the mean dependency, and 1 if the completion is to be weighed
        statistics = context.accelerator.gather(
            torch.stack([mean_dependencies, (replaces & mask.any(1)).to(mean_dependencies.dtype)], dim=1)
        )
        completion_weights = advantage_weights(statistics[:, 0], statistics[:, 1] > 0, settings.advantage_min)
        context.metrics.add({"view/weight_max": largest(completion_weights, is_of_all_ranks=True)})
        local_weights = local_rows(context.accelerator, completion_weights, len(rollout))
        local_weights = local_weights if advantages.dim() == 1 else local_weights[:, None]
        rollout = replace(rollout, advantages=advantages * local_weights)
    if settings.temperature is not None:
        token_weights = relevance_weights(dependency, mask, settings.temperature)
    elif settings.token_quantile < 1:
        token_weights = high_entropy_mask(dependency, mask, settings.token_quantile, scope="sequence")
    else:
        return rollout
    weights = torch.where(replaces[:, None], token_weights, 1.0)
    return replace(rollout, tokens=replace(rollout.tokens, weights=weights))


def with_view_term(
    output: LossOutput, scores: Scores, inputs: Rollout, args: "MultimodalGRPOConfig", normalizer: Normalizer
) -> LossOutput:
    """Adds the view's terms, averaged like the policy loss, and their metrics to the loss of a micro-batch."""
    mask = inputs.loss_mask
    loss_type = args.loss
    settings = args.loss_view_settings
    # Without scores under the view, the terms that read them have coefficients of 0, so any scores can stand in
    view_scores = scores if scores.view is None else scores.view
    losses, kl = view_term(
        scores.logps,
        view_scores.logps,
        mask,
        kl_coef=settings.kl_coef,
        kl_clip=settings.kl_clip,
        entropy_coefs=settings.entropy_coefs or (0.0, 0.0),
    )
    metrics = dict(output.metrics)
    if scores.view is not None:
        view_mask = mask * inputs.view.replaces[:, None]
        metrics |= {
            "view/kl": scored_mean(kl, view_mask),
            "view/entropy": scored_mean(view_scores.entropies, view_mask),
        }
    return LossOutput(output.loss + loss_type.average(losses, mask, normalizer), metrics)
