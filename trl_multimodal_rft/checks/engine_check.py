# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Log-probabilities of an engine that samples the rollouts, such as vLLM, against those of the policy."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..encoding.conversations import Conversation
from ..encoding.prompts import EncodedPrompt
from ..forward.layout import group_by_prompt
from ..models.modes import measuring
from ..policy import Completions, PolicyForward
from .measure import tolerance_of
from .self_check import SelfCheck


# Completions of each process that are compared
_PROBES = 4

# After an update, an engine's log-probabilities may be farther from the policy's than before, by this factor. That
# some weights don't reach the engine shows when the policy's have moved by a multiple of what that allows.
_GROWS, _SHOWS = 4, 2


class EngineCheck:
    """
    Compares an engine on the first batch, on the first one after the weights have moved so far that it shows if the
    engine didn't get them, and on the first media that tools return.

    A few completions of each process are looked at, each by itself. `check` gets what was measured; `dtype` is the
    engine's, `logit_bias` what it adds to logits.
    """

    def __init__(self, policy: PolicyForward, check: SelfCheck, dtype: torch.dtype, logit_bias: dict[int, float]):
        assert policy.accelerator is not None
        self.policy = policy
        self.check = check
        check.engine = check.engine_updated = check.engine_conversation = None
        self.tolerance = max(check.tolerance, tolerance_of(dtype))
        self.logit_bias = logit_bias
        self.accelerator = policy.accelerator
        self.step = -1  # the last one looked at
        self.first: tuple[Completions, torch.Tensor, torch.Tensor] | None = None  # with log-probabilities and mask

    def run(
        self, model: nn.Module, step: int, completions: Completions, mask: torch.Tensor, sampled: torch.Tensor
    ) -> bool:
        """
        Measures a batch after `step` updates, if that tells something new.

        Shapes: `mask` of the tokens that were sampled and their log-probabilities `sampled`, `(B, C)`.
        """
        check = self.check
        if check.engine_updated is not None or step == self.step:
            return False
        self.step = step
        if self.first is not None and not self._moved(model) > _SHOWS * self._limit():
            return False
        mask = mask * ~sampled.isnan()  # an engine may have none of a token
        rows = _telling(completions[0], mask)
        probes = _chosen(completions, rows)
        logps, mask = self._score(model, probes), mask[rows]
        measured = self._difference(logps, sampled[rows], mask)
        if measured is None:
            return False
        limit, before = self._limit(), check.engine
        if before is None:
            check.engine, self.first = measured, (probes, logps, mask)
            when = "on the first batch"
            reason = (
                "it has other settings or weights, or makes something else of the media. Load the model and "
                "`processing_class` from one folder, and start a server with that folder, too"
            )
        else:
            check.engine_updated, self.first = measured, None  # media and all
            when = f"after {step} updates, and were {before[0]:.0e} before"
            reason = "it doesn't get all weights that are trained, or rounds them"
        self._judge(measured, limit, when, reason)
        return True

    def run_after_tools(
        self, model: nn.Module, completions: Completions, mask: torch.Tensor, sampled: torch.Tensor
    ) -> bool:
        """Measures what was sampled after media that a tool returned, the first time that there is something."""
        if self.check.engine_conversation is not None:
            return False
        mask = mask * ~sampled.isnan()
        for i, prompt in enumerate(completions[0]):
            mask[i, : len(prompt.later) if isinstance(prompt, Conversation) else None] = 0
        row = [int(mask.sum(1).argmax())]  # any, where there is none
        if not self.accelerator.reduce(mask[row].sum(), reduction="sum").item():
            return False
        logps = self._score(model, _chosen(completions, row))
        measured = self._difference(logps, sampled[row], mask[row])
        assert measured is not None
        limit, self.check.engine_conversation = self._limit(), measured
        reason = "it makes something else of media that tools return, or has them at other positions"
        self._judge(measured, limit, "after tool media", reason)
        return True

    def _judge(self, measured: tuple[float, float], limit: float, when: str, reason: str) -> None:
        mean, largest = measured
        is_strict = self.tolerance <= tolerance_of(torch.float32)
        if not mean <= limit or (is_strict and not largest <= self.tolerance):
            raise RuntimeError(
                f"self-check: the engine's log-probabilities are {mean:.0e} on average, {largest:.0e} at most, from "
                f"the policy's {when}. Rounding explains an average of {limit:.0e}, so {reason}. Set "
                "`use_vllm=False`, or `self_check=False` to train anyway."
            )

    def _limit(self) -> float:
        """How far apart log-probabilities may be on average: not much farther than they were before the update."""
        limit = self.tolerance / 2
        if self.check.engine is None:
            return limit
        return min(limit, max(_GROWS * self.check.engine[0], self.tolerance**2 / 2, tolerance_of(torch.float32) / 2))

    def _moved(self, model: nn.Module) -> float:
        """How far the policy's log-probabilities of the first batch have moved on average."""
        assert self.first is not None
        completions, before, mask = self.first
        moved = self._difference(self._score(model, completions), before, mask)
        assert moved is not None
        return moved[0]

    def _score(self, model: nn.Module, completions: Completions) -> torch.Tensor:
        """The policy's log-probabilities `(N, C)`, one completion at a time: with a bias, logits are all kept."""
        options = {"packed": False, "logit_bias": self.logit_bias}
        rows = (_chosen(completions, [i]) for i in range(len(completions[0])))
        with measuring(model, completions[1].device):
            return torch.cat([self.policy.score(model, *row, **options).logps for row in rows])

    def _difference(self, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> tuple[float, float] | None:
        """Mean and largest over all processes; `None` if there are no tokens."""
        difference = torch.where(mask.bool(), (a - b).abs(), 0.0).nan_to_num(nan=math.inf)
        sums = torch.stack([difference.sum(), mask.sum().float()])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        largest = self.accelerator.gather(difference.max()[None]).max().item()
        return (total / count, largest) if count else None


def _chosen(completions: Completions, rows: list[int]) -> Completions:
    prompts, ids, mask = completions
    return [replace(prompts[i], mask_cache={}) for i in rows], ids[rows], mask[rows]


def _telling(prompts: Sequence[EncodedPrompt], mask: torch.Tensor) -> list[int]:
    """A few completions with tokens, first of prompts with different kinds of media, then of different prompts."""
    order: dict[int, tuple] = {}
    n_of_kinds: Counter[frozenset[str]] = Counter()
    for prompt, rows in group_by_prompt(prompts).items():
        place = n_of_kinds[prompt.modalities]
        n_of_kinds[prompt.modalities] += 1
        empty = {i: not mask[i].any() for i in rows}
        order |= {i: (empty[i], nth, place) for nth, i in enumerate(sorted(rows, key=empty.__getitem__))}
    return sorted(order, key=order.__getitem__)[:_PROBES]
