# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Comparison of a sampling engine's log-probabilities, such as vLLM's, with the policy's."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..encoding.conversations import Contexts, Conversation
from ..encoding.prompts import EncodedPrompt
from ..forward.prompt_groups import group_by_prompt
from ..forward.scores import ScoreRequest
from ..models.modes import measurement_mode
from ..models.wrapped import computing_dtype
from ..policy import Completions, PolicyForward
from .rounding import STRICT, measure_noise, tolerance_of
from .self_check import SelfCheck


# Number of completions that each rank compares
_N_PROBES = 4

# The limit after an update is `_GROWTH_FACTOR` times the difference before it. An engine that lacks the new weights is
# detectable once they have moved the policy's log-probabilities by `_DETECTION_FACTOR` times the limit.
_GROWTH_FACTOR = 4
_DETECTION_FACTOR = 2


class EngineCheck:
    """
    Comparison of an engine with the policy on three batches.

    The batches are the first one, the first one with media that tools return, and the first one after updates that
    moved log-probabilities far enough to detect an engine with old weights. The policy scores a few completions of
    each rank one by one. In half precision, if scores differ by more than the constant limit, the noise of the
    policy's own scores is measured, see [`rounding`]. Results go into `check`. `dtype` and `logit_bias` are the
    engine's.

    For example, the tolerance in bfloat16 is 0.18. If the first batch has a mean difference of 0.01, the limit after
    updates is 4 * 0.01 = 0.04. The engine is compared again once log-probabilities have moved by 2 * 0.04 on average.
    """

    def __init__(self, policy: PolicyForward, check: SelfCheck, dtype: torch.dtype, logit_bias: dict[int, float]):
        assert policy.accelerator is not None
        self.policy = policy
        self.check = check
        check.engine = check.engine_updated = check.engine_conversation = None
        self.dtype = dtype
        self.tolerance = max(check.tolerance, tolerance_of(dtype))
        self.noise = 0.0  # largest mean noise of a batch's tokens so far
        self.logit_bias = logit_bias
        self.accelerator = policy.accelerator
        self.step = -1  # number of updates before the batch of the last call of `run`
        # A few completions of the first batch, the policy's log-probabilities of their tokens, and the mask of `run`
        self.first_batch: tuple[Completions, torch.Tensor, torch.Tensor] | None = None

    def run(
        self, model: nn.Module, step: int, completions: Completions, mask: torch.Tensor, sampled: torch.Tensor
    ) -> bool:
        """
        Measures a batch after `step` updates, and returns whether there is a new result. `mask` `(B, C)` is 1 on
        sampled tokens, and `sampled` `(B, C)` holds the engine's log-probabilities.
        """
        check = self.check
        if check.engine_updated is not None or step == self.step:
            return False
        self.step = step
        change = math.inf if self.first_batch is None else self._policy_change(model)
        if not change > _DETECTION_FACTOR * self._limit():
            return False
        mask = mask * ~sampled.isnan()  # an engine may leave out log-probabilities
        indices = _diverse_rows(completions[0], mask)
        probes = _subset(completions, indices)
        logps = self._score(model, probes)
        mask = mask[indices]
        difference = self._difference(logps, sampled[indices], mask)
        if difference is None:  # no probe of any rank has a token with the engine's log-probability
            return False
        self._allow_noise(model, difference, probes, mask)
        limit = self._limit()
        first_difference = check.engine
        # Noise may have raised the limit, so that an engine with old weights can't be told yet
        if not change > _DETECTION_FACTOR * limit:
            return False
        if first_difference is None:
            check.engine = difference
            self.first_batch = probes, logps, mask
            when = "on the first batch"
            reason = (
                "the engine's settings, weights or processed media differ from the trainer's. Load model and "
                "`processing_class` from one folder, and start servers with the same folder"
            )
        else:
            check.engine_updated = difference
            self.first_batch = None  # frees the media
            when = f"after {step} updates (before them, {first_difference[0]:.0e} on average)"
            reason = "the engine doesn't get all trained weights, or rounds them"
        self._check_difference(difference, limit, when, reason)
        return True

    def run_after_tools(
        self, model: nn.Module, completions: Completions, mask: torch.Tensor, sampled: torch.Tensor
    ) -> bool:
        """
        Measures the completion with the most tokens after tool media, in the first batch that has such tokens. Returns
        whether there is a new result.
        """
        if self.check.engine_conversation is not None:
            return False
        mask = mask * ~sampled.isnan()
        # Only tokens after tool media count. In a `Conversation`, they follow the last result, the end of `later`. In
        # `Contexts`, they follow the first context. For other prompts, `n_first` is `None`, so that no token counts.
        for i, prompt in enumerate(completions[0]):
            n_first = prompt.ends[0] if isinstance(prompt, Contexts) else None
            mask[i, : len(prompt.later) if isinstance(prompt, Conversation) else n_first] = 0
        indices = [int(mask.sum(1).argmax())]
        if not self.accelerator.reduce(mask[indices].sum(), reduction="sum").item():
            return False
        probes = _subset(completions, indices)
        difference = self._difference(self._score(model, probes), sampled[indices], mask[indices])
        assert difference is not None
        self._allow_noise(model, difference, probes, mask[indices])
        limit = self._limit()
        self.check.engine_conversation = difference
        reason = "the engine processes media of tool results differently, or gives them other positions"
        self._check_difference(difference, limit, "after tool media", reason)
        return True

    def _check_difference(self, difference: tuple[float, float], limit: float, when: str, reason: str) -> None:
        mean, largest = difference
        if not mean <= limit or (self.tolerance <= STRICT and not largest <= self.tolerance):
            raise RuntimeError(
                f"self-check: the engine's log-probabilities differ by {mean:.0e} on average, {largest:.0e} at most, "
                f"from the policy's {when}. Rounding explains {limit:.0e} on average, so {reason}. Or let "
                "transformers sample (`use_vllm=False`), or set `self_check=False` to train anyway."
            )

    def _limit(self) -> float:
        """After updates, the limit of the mean difference depends on the difference before them."""
        limit = self.tolerance / 2 + 2 * self.noise
        if self.check.engine is None:
            return limit
        first_difference = max(self.check.engine[0], self.noise)
        # `tolerance**2 / 2` is two epsilons of the dtype: at least this much, if the first difference is almost 0
        return min(limit, max(_GROWTH_FACTOR * first_difference, self.tolerance**2 / 2, STRICT / 2))

    def _allow_noise(
        self, model: nn.Module, difference: tuple[float, float], completions: Completions, mask: torch.Tensor
    ) -> None:
        """Raises the limit by the noise of completions if their mean difference exceeds the limit so far."""
        if self.tolerance <= STRICT or difference[0] <= self._limit():
            return
        policy = self.policy.unwrapped(model)
        dtype = max(self.dtype, computing_dtype(self.accelerator, policy), key=tolerance_of)
        noise = measure_noise(policy, dtype, lambda: self._score(model, completions), mask)
        mean_and_largest = self._difference(noise, torch.zeros_like(noise), mask)
        self.noise = max(self.noise, mean_and_largest[0] if mean_and_largest else 0.0)

    def _policy_change(self, model: nn.Module) -> float:
        """Returns the mean change of the policy's log-probabilities of the first batch since the first comparison."""
        assert self.first_batch is not None
        completions, first_logps, mask = self.first_batch
        change = self._difference(self._score(model, completions), first_logps, mask)
        assert change is not None
        return change[0]

    def _score(self, model: nn.Module, completions: Completions) -> torch.Tensor:
        """Returns `(N, C)`. Each completion has its own forward, since `logit_bias` keeps all logits in memory."""
        options = {"packed": False, "logit_bias": self.logit_bias}
        singles = (_subset(completions, [i]) for i in range(len(completions[0])))
        with measurement_mode(model, completions[1].device):
            return torch.cat([self.policy.score(model, ScoreRequest(*single, **options)).logps for single in singles])

    def _difference(self, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> tuple[float, float] | None:
        """Returns the mean and the largest absolute difference over tokens of all ranks, `None` if no mask has a 1."""
        difference = torch.where(mask.bool(), (a - b).abs(), 0.0).nan_to_num(nan=math.inf)
        sums = torch.stack([difference.sum(), mask.sum().float()])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        largest = self.accelerator.gather(difference.max()[None]).max().item()
        return (total / count, largest) if count else None


def _subset(completions: Completions, rows: list[int]) -> Completions:
    """Prompts are copies, so that the originals' caches stay empty."""
    prompts, ids, mask = completions
    return [replace(prompts[i], mask_cache={}) for i in rows], ids[rows], mask[rows]


def _diverse_rows(prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> list[int]:
    """
    Returns batch indices of up to `_N_PROBES` completions, those with tokens first: the first completion of each
    prompt before all second ones, and among them those whose prompts have modalities that no earlier prompt has.
    """
    # By batch index: whether the completion is empty, its position among the prompt's completions (empty ones last),
    # and the number of earlier prompts with the same modalities
    sort_keys: dict[int, tuple] = {}
    n_prompts: Counter[frozenset[str]] = Counter()  # by set of modalities
    for prompt, indices in group_by_prompt(prompts).items():
        n_earlier = n_prompts[prompt.modalities]
        n_prompts[prompt.modalities] += 1
        is_empty = {i: not mask[i].any() for i in indices}
        sort_keys |= {
            i: (is_empty[i], nth, n_earlier) for nth, i in enumerate(sorted(indices, key=is_empty.__getitem__))
        }
    return sorted(sort_keys, key=sort_keys.__getitem__)[:_N_PROBES]
