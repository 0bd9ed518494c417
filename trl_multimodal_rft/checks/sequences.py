# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The self-check of rows with completions: scores in one forward against the model's own forward of each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..encoding.join import padded
from ..encoding.prompts import EncodedPrompt
from ..encoding.supervised import PreferencePair, SupervisedSequence
from ..models.modes import measuring
from ..policy import PolicyForward
from .measure import Case, Measure
from .self_check import SelfCheck


_LAST = 256  # tokens of a row that are compared, for whose logits there is memory

# Returns what the processor as loaded makes of a row with media, by its index
Plain = Callable[[int], dict[str, torch.Tensor]]
Cases = tuple[list[Case], dict[str, EncodedPrompt], list[Any]]


def check_sequences(
    policy: PolicyForward, model: nn.Module, sequences: Sequence[SupervisedSequence], packs: bool, plain: Plain
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
        plain (`Callable[[int], dict[str, torch.Tensor]]`):
            Returns what the processor as loaded makes of one of these rows, by its index.

    Returns:
        [`SelfCheck`]: The largest differences, with the fallbacks under which they hold.

    Raises:
        `RuntimeError`: If scores aren't exact with any fallback, media tensors aren't the processor's, or another
            medium changes nothing.
    """
    measure = Measure(policy, model, engine_positions=False)
    cases = _cases(measure, sequences, plain)
    rows = cases[2]
    ids = pad_sequence([row.input_ids[1:] for row in rows], batch_first=True).to(measure.device)
    mask = pad_sequence([_compared(row) for row in rows], batch_first=True).to(measure.device)

    def by_model() -> torch.Tensor:
        return pad_sequence([measure.row_logps(row, _LAST)[0] for row in rows], batch_first=True)

    def score(rows: list[Any], packed: bool) -> torch.Tensor:
        options = {"packed": packed, "fallbacks": measure.fallbacks, "whole": True}
        return policy.score(model, rows, ids, mask.long(), **options).logps

    return _compare(measure, cases, by_model, score, mask, packs)


def check_pairs(
    policy: PolicyForward,
    model: nn.Module,
    pairs: Sequence[PreferencePair],
    packs: bool,
    plain: Plain,
    rewards: bool = False,
) -> SelfCheck:
    """
    Measures a policy on the completions of the pairs with the longest and the shortest prompts, like
    [`check_sequences`], which has the arguments and errors. Packed, a prompt is forwarded once for both. The `rewards`
    of a reward model stand in the place of log-probabilities.
    """
    measure = Measure(policy, model, engine_positions=False)
    cases = _cases(measure, pairs, plain)
    rows = [row for pair in cases[2] for row in pair.sequences(measure.model)]
    completions = [row.input_ids[row.learned] for row in rows]
    ids, mask = (each.to(measure.device) for each in padded(completions))
    last = torch.arange(ids.size(1), device=ids.device) >= mask.sum(1, keepdim=True) - _LAST

    def by_model() -> torch.Tensor:
        if rewards:
            return torch.cat([measure.row_reward(row) for row in rows])
        each = [measure.row_logps(row, _LAST)[0][-len(ids) :] for row, ids in zip(rows, completions, strict=True)]
        return pad_sequence(each, batch_first=True)

    def score(chosen: list[Any], packed: bool) -> torch.Tensor:
        prompts = [pair for pair in chosen for _ in range(2)]
        options = {"packed": packed, "fallbacks": measure.fallbacks}
        if rewards:
            return policy.rewards(model, (prompts, ids, mask), **options).values
        return policy.score(model, prompts, ids, mask, **options).logps

    return _compare(measure, cases, by_model, score, mask[:, :1] > 0 if rewards else mask.bool() & last, packs)


def _compare(
    measure: Measure,
    cases: Cases,
    by_model: Callable[[], torch.Tensor],
    score: Callable[[list[Any], bool], torch.Tensor],
    mask: torch.Tensor,
    packs: bool,
) -> SelfCheck:
    """
    Compares scores of padded and of packed rows with those of the model's own forward, where the mask is true, and
    with those of other media, and media tensors with those of the processor.
    """
    (targets, donors, rows), features, media = cases, list[float](), dict[str, float]()
    for ours, plain in ((case.prompt.media, case.plain) for case in targets if case.prompt.media):
        features.append(measure.features(ours, {name: plain[name] for name in ours.keys() & plain.keys()}))
    with measuring(measure.prepared, measure.device):
        truth = measure.require("the model's forward", by_model)
        noise = functools.cache(lambda: measure.noise(by_model, mask))
        own = functools.partial(score, rows)
        scores, padded, packed = measure.settle(own, truth, mask, noise, packs=packs, isolates=True)
        for row in (case.prompt for case in targets):

            def swap(other: EncodedPrompt, row: EncodedPrompt = row) -> torch.Tensor:
                return score([other if each is row else each for each in rows], False)

            for kind in sorted(row.modalities - media.keys()):
                media[kind] = measure.effect(kind, row, donors.get(kind), swap, scores, mask)
    facts = {"tolerance": measure.tolerance, "fallbacks": measure.fallbacks, "media": media}
    return SelfCheck(features=max(features, default=None), padded=padded, packed=packed, **facts)


def _cases(measure: Measure, rows: Sequence[EncodedPrompt], plain: Plain) -> Cases:
    """Rows whose media are compared, those to take other media from by modality, and all to measure, of all ranks."""
    read = measure.cases(rows, lambda i: plain(i) if rows[i].modalities else rows[i].media)  # which may be blank
    return *read[:2], list(dict.fromkeys([*(case.prompt for case in read[0]), *read[2]]))


def _compared(row: SupervisedSequence) -> torch.Tensor:
    """Which tokens after the first are compared: those of the last that are learned, or else all that are."""
    learned = row.learned & (torch.arange(len(row)) >= len(row) - _LAST)
    return (learned if learned[1:].any() else row.learned)[1:]
