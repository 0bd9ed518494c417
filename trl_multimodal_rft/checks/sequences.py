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
from .measure import Measure
from .self_check import SelfCheck


_LAST = 256  # tokens of a row that are compared, for whose logits there is memory

Plain = Callable[[int], dict[str, torch.Tensor]]


def check_sequences(
    policy: PolicyForward,
    model: nn.Module,
    sequences: Sequence[SupervisedSequence],
    packs: bool,
    plain: Plain,
    media: dict[str, float],
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
            Returns what the processor as loaded makes of one of these rows.
        media (`dict[str, float]`):
            Effects that were measured before.

    Returns:
        [`SelfCheck`]: The largest differences, with the fallbacks under which they hold.

    Raises:
        `RuntimeError`: If scores aren't exact with any fallback, if media tensors aren't the processor's, or if
            another medium doesn't move scores.
    """
    measure = Measure(policy, model, engine_positions=False)

    def mask(rows: list[Any]) -> torch.Tensor:
        return pad_sequence([_compared(row) for row in rows], batch_first=True).to(measure.device)

    def by_model(rows: list[Any]) -> torch.Tensor:
        return pad_sequence([measure.row_logps(row, _LAST)[0] for row in rows], batch_first=True)

    def score(rows: list[Any], packed: bool) -> torch.Tensor:
        ids = pad_sequence([row.input_ids[1:] for row in rows], batch_first=True).to(measure.device)
        options = {"packed": packed, "fallbacks": measure.fallbacks, "whole": True}
        return policy.score(model, rows, ids, mask(rows).long(), **options).logps

    return _compare(measure, sequences, plain, media, mask, by_model, score, packs)


def check_pairs(
    policy: PolicyForward,
    model: nn.Module,
    pairs: Sequence[PreferencePair],
    packs: bool,
    plain: Plain,
    media: dict[str, float],
    rewards: bool = False,
) -> SelfCheck:
    """
    Measures a policy on the completions of the pairs with the longest and the shortest prompts, like
    [`check_sequences`], which has the arguments and errors. Packed, a prompt is forwarded once for both. The `rewards`
    of a reward model stand in the place of log-probabilities.
    """
    measure = Measure(policy, model, engine_positions=False)

    def sequences(chosen: list[Any]) -> list[SupervisedSequence]:
        return [row for pair in chosen for row in pair.sequences(measure.model)]

    def completions(chosen: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = padded([row.input_ids[row.learned] for row in sequences(chosen)])
        return ids.to(measure.device), mask.to(measure.device)

    def mask(chosen: list[Any]) -> torch.Tensor:
        ids, mask = completions(chosen)
        last = torch.arange(ids.size(1), device=ids.device) >= mask.sum(1, keepdim=True) - _LAST
        return mask[:, :1] > 0 if rewards else mask.bool() & last

    def by_model(chosen: list[Any]) -> torch.Tensor:
        rows = sequences(chosen)
        if rewards:
            return torch.cat([measure.row_reward(row) for row in rows])
        each = [measure.row_logps(row, _LAST)[0][-int(row.learned.sum()) :] for row in rows]
        return pad_sequence(each, batch_first=True)

    def score(chosen: list[Any], packed: bool) -> torch.Tensor:
        prompts = [pair for pair in chosen for _ in range(2)]
        options = {"packed": packed, "fallbacks": measure.fallbacks}
        if rewards:
            return policy.rewards(model, (prompts, *completions(chosen)), **options).values
        return policy.score(model, prompts, *completions(chosen), **options).logps

    return _compare(measure, pairs, plain, media, mask, by_model, score, packs)


def _compare(
    measure: Measure,
    rows: Sequence[EncodedPrompt],
    plain: Plain,
    media: dict[str, float],
    mask: Callable[[list[Any]], torch.Tensor],
    by_model: Callable[[list[Any]], torch.Tensor],
    score: Callable[[list[Any], bool], torch.Tensor],
    packs: bool,
) -> SelfCheck:
    """
    Compares scores of padded and of packed rows with those of the model's own forward, where the mask is true, media
    tensors with the processor's, and scores with those of other media.
    """
    targets, donors, partners = measure.cases(rows, lambda i: plain(i) if rows[i].media else {})
    chosen = list({id(each): each for each in [*(case.prompt for case in targets), *partners]}.values())
    compared, media, features = mask(chosen), dict(media), list[float]()
    for ours, outputs in ((case.prompt.media, case.plain) for case in targets if case.prompt.media):
        features.append(measure.features(ours, {name: outputs[name] for name in ours.keys() & outputs.keys()}))
    with measuring(measure.prepared, measure.device):
        truth = measure.require("the model's forward", lambda: by_model(chosen))
        noise = functools.cache(lambda: measure.noise(lambda: by_model(chosen), compared))
        _, padded, packed = measure.settle(
            lambda packed: score(chosen, packed), truth, compared, noise, packs=packs, isolates=True
        )
        for row in [case.prompt for case in targets]:
            for kind in sorted(row.modalities - media.keys()):
                scores = measure.require(f"scoring {kind}", lambda row=row: score([row], False))
                given = donors.get(kind), lambda rows: score(rows, False), scores, mask([row])
                media[kind] = measure.effect(kind, row, *given)
    return SelfCheck(
        features=max(features, default=None),
        padded=padded,
        packed=packed,
        media=media,
        tolerance=measure.tolerance,
        fallbacks=measure.fallbacks,
    )


def _compared(row: SupervisedSequence) -> torch.Tensor:
    """Which tokens after the first are compared: those of the last that are learned, or else all that are."""
    last = torch.arange(len(row)) >= len(row) - _LAST
    learned = row.learned & last
    return (learned if learned[1:].any() else row.learned)[1:]
