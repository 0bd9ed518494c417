# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What of a rollout isn't forwarded, since it is known or shared, or has no gradient."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..algorithms.metrics import Metric, share
from ..policy import PolicyForward
from .ranks import sum_over_ranks
from .rollout import Rollout


def n_on_policy(args: Any, steps_per_rollout: int) -> int:
    """
    Returns the number of on-policy micro-batches of a rollout, which are those before the first update.
    `steps_per_rollout` is `steps_per_generation` times the number of iterations over a rollout. With
    `steps_per_generation=4` and `gradient_accumulation_steps=2`, the first update comes after 2 micro-batches.
    """
    steps = args.steps_per_generation
    accumulation = args.gradient_accumulation_steps
    if accumulation % steps_per_rollout == 0:  # no update before the rollout is used up
        return steps
    # If neither `accumulation` nor `steps_per_rollout` divides the other, an update may span two rollouts. Then no
    # micro-batch counts as on-policy.
    return min(steps, accumulation) if steps_per_rollout % accumulation == 0 else 0


def without_gradient(rollout: Rollout) -> list[bool]:
    """Returns whether completions have a policy gradient of exactly 0, as in a group with equal rewards."""
    advantages = rollout.advantages
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    return (~((advantages != 0) & rollout.loss_mask.bool()).any(1)).tolist()


def packing_metrics(
    policy: PolicyForward, model: PreTrainedModel, micro_batches: Sequence[Rollout]
) -> dict[str, Metric]:
    """
    Returns two shares over all ranks: prompt tokens that aren't forwarded because completions share a prompt, and
    completions that aren't forwarded because they have no gradient.
    """
    # Prompt tokens of a micro-batch, if each completion had its own copy of the prompt
    n_unshared = []
    for part in micro_batches:
        n_unshared.append(sum(sum(map(len, prompt.contexts)) for prompt in part.prompts))
    n_forwarded = [
        policy.n_prompt_tokens(model, part.prompts, part.completion_mask.sum(1).tolist()) if part.packed else n_tokens
        for part, n_tokens in zip(micro_batches, n_unshared, strict=True)
    ]
    n_skipped = sum(sum(part.tokens.without_gradient) for part in micro_batches)
    counts = [sum(n_forwarded), sum(n_unshared), n_skipped, sum(map(len, micro_batches))]
    n_forwarded, n_unshared, n_skipped, n_completions = sum_over_ranks(policy.accelerator, counts)
    return {
        "packing/shared_frac": share(n_unshared - n_forwarded, n_unshared, is_of_all_ranks=True),
        "packing/skipped_frac": share(n_skipped, n_completions, is_of_all_ranks=True),
    }
