# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The self-check of rows with completions: scores in one forward against the model's own forward of each."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..encoding.join import padded
from ..encoding.prompts import EncodedPrompt
from ..encoding.supervised import PreferencePair, SupervisedSequence
from ..models.modes import measuring
from ..policy import PolicyForward
from .measure import Measure
from .self_check import SelfCheck
from .targets import choose, traits_of


_LAST = 256  # tokens of a row that are compared, for whose logits there is memory

Encoded = TypeVar("Encoded", bound=EncodedPrompt)


def check_sequences(
    policy: PolicyForward, model: nn.Module, sequences: Sequence[SupervisedSequence], packs: bool
) -> SelfCheck:
    """
    Measures a policy, which it doesn't change, on the longest and the shortest rows of a batch, on all ranks the same.

    Args:
        policy ([`~policy.PolicyForward`]):
            The policy.
        model ([`~torch.nn.Module`]):
            The model as the accelerator prepared it.
        sequences (`Sequence[SupervisedSequence]`):
            This rank's rows.
        packs (`bool`):
            Whether rows are packed.

    Returns:
        [`SelfCheck`]: The largest differences, with the fallbacks under which they hold.

    Raises:
        `RuntimeError`: If scores aren't exact with any fallback.
    """
    measure = Measure(policy, model, engine_positions=False)
    rows = _chosen(measure, sequences)
    ids = pad_sequence([row.input_ids[1:] for row in rows], batch_first=True).to(measure.device)
    mask = pad_sequence([_compared(row) for row in rows], batch_first=True).to(measure.device)

    def by_model() -> torch.Tensor:
        return pad_sequence([measure.row_logps(row, _LAST)[0] for row in rows], batch_first=True)

    def score(packed: bool) -> torch.Tensor:
        options = {"packed": packed, "fallbacks": measure.fallbacks, "whole": True}
        return policy.score(model, rows, ids, mask.long(), **options).logps

    return _compare(measure, by_model, score, mask, packs)


def check_pairs(
    policy: PolicyForward, model: nn.Module, pairs: Sequence[PreferencePair], packs: bool, rewards: bool = False
) -> SelfCheck:
    """
    Measures a policy on the completions of the pairs with the longest and the shortest prompts, like
    [`check_sequences`], which has the arguments and errors. Packed, a prompt is forwarded once for both. The `rewards`
    of a reward model stand in the place of log-probabilities.
    """
    measure = Measure(policy, model, engine_positions=False)
    chosen = _chosen(measure, pairs)
    prompts = [pair for pair in chosen for _ in range(2)]
    rows = [row for pair in chosen for row in pair.sequences(measure.model)]
    completions = [row.input_ids[row.learned] for row in rows]
    ids, mask = (each.to(measure.device) for each in padded(completions))
    last = torch.arange(ids.size(1), device=ids.device) >= mask.sum(1, keepdim=True) - _LAST

    def by_model() -> torch.Tensor:
        if rewards:
            return torch.cat([measure.row_reward(row) for row in rows])
        each = [measure.row_logps(row, _LAST)[0][-len(ids) :] for row, ids in zip(rows, completions, strict=True)]
        return pad_sequence(each, batch_first=True)

    def score(packed: bool) -> torch.Tensor:
        options = {"packed": packed, "fallbacks": measure.fallbacks}
        if rewards:
            return policy.rewards(model, (prompts, ids, mask), **options).values
        return policy.score(model, prompts, ids, mask, **options).logps

    return _compare(measure, by_model, score, mask[:, :1] > 0 if rewards else mask.bool() & last, packs)


def _compare(
    measure: Measure,
    by_model: Callable[[], torch.Tensor],
    score: Callable[[bool], torch.Tensor],
    mask: torch.Tensor,
    packs: bool,
) -> SelfCheck:
    """Compares scores of padded and of packed rows with those of the model's own forward, where the mask is true."""
    with measuring(measure.prepared, measure.device):
        truth = measure.require("the model's forward", by_model)
        noise = functools.cache(lambda: measure.noise(by_model, mask))
        _, padded, packed = measure.settle(score, truth, mask, noise, packs=packs, isolates=True)
    return SelfCheck(padded=padded, packed=packed, tolerance=measure.tolerance, fallbacks=measure.fallbacks)


def _chosen(measure: Measure, sequences: Sequence[Encoded]) -> list[Encoded]:
    """The rows to measure, of all ranks."""
    process = measure.accelerator.process_index
    traits = gather_object([traits_of(process, i, each) for i, each in enumerate(sequences)])
    targets, _, partners = choose(traits)
    rows = []
    for each in dict.fromkeys([*targets, *partners]):
        own = [sequences[each.index] if each.process == process else None]
        rows += broadcast_object_list(own, from_process=each.process)
    return rows


def _compared(row: SupervisedSequence) -> torch.Tensor:
    """Which tokens after the first are compared: those of the last that are learned, or else all that are."""
    last = torch.arange(len(row)) >= len(row) - _LAST
    learned = row.learned & last
    return (learned if learned[1:].any() else row.learned)[1:]
