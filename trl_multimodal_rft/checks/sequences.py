# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Self-check of rows with completions: batched scores against the model's own forward of each row."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..data.rows.pairs import COMPLETIONS
from ..encoding.join import padded
from ..encoding.prompts import EncodedPrompt
from ..encoding.supervised import PreferencePair, SupervisedSequence
from ..forward.scores import ScoreRequest, with_answer
from ..models.modes import measurement_mode
from ..policy import PolicyForward
from .measure import Case, Measure
from .self_check import SelfCheck


_N_COMPARED = 256  # compared tokens at the end of a row, few enough for their logits to fit into memory

# Takes the index of a row, and optionally the column (`chosen` or `rejected`) of a completion with media. Returns the
# outputs of the processor, as `AutoProcessor` loads it, for this row and completion
PlainOutputs = Callable[..., dict[str, torch.Tensor]]
# A preference pair, the column (`chosen` or `rejected`) of its answer with media, and the processor's outputs for
# prompt and answer
MediaAnswer = tuple[PreferencePair, str, dict[str, torch.Tensor]]
# Prompts to compare with the processor; by modality, a prompt whose media replace a measured prompt's, to test their
# effect; and all rows to measure
Cases = tuple[list[Case], dict[str, EncodedPrompt], list[Any]]


def check_sequences(
    policy: PolicyForward,
    model: nn.Module,
    sequences: Sequence[SupervisedSequence],
    packs: bool,
    processor_outputs: PlainOutputs,
) -> SelfCheck:
    """
    Measures a policy on the longest and the shortest rows of a batch of all ranks, without changing the policy.

    Args:
        policy ([`~policy.PolicyForward`]):
            The policy.
        model ([`~torch.nn.Module`]):
            The model as the accelerator prepared it.
        sequences (`Sequence[SupervisedSequence]`):
            This rank's rows.
        packs (`bool`):
            Whether rows are packed.
        processor_outputs (`Callable[[int], dict[str, torch.Tensor]]`):
            Takes an index of `sequences`, and returns the outputs of the processor, as `AutoProcessor` loads it, for
            that row.

    Returns:
        [`SelfCheck`]: The largest differences, with the fallbacks under which they hold.

    Raises:
        `RuntimeError`: If no fallback makes scores exact, media tensors differ from the processor's, or scores stay
            the same when a row's media are replaced.
    """
    measure = Measure(policy, model, has_engine_positions=False)
    cases = _cases(measure, sequences, processor_outputs)
    rows = cases[2]
    ids = pad_sequence([row.input_ids[1:] for row in rows], batch_first=True).to(measure.device)
    mask = pad_sequence([_compared_tokens(row) for row in rows], batch_first=True).to(measure.device)

    def score_by_model() -> torch.Tensor:
        return pad_sequence([measure.row_logps(row, _N_COMPARED)[0] for row in rows], batch_first=True)

    def score(rows: list[Any], packed: bool) -> torch.Tensor:
        request = ScoreRequest(rows, ids, mask.long(), packed=packed, whole=True)
        return policy.score(model, request, fallbacks=measure.fallbacks).logps

    return _compare(measure, cases, score_by_model, score, mask, packs)


def check_pairs(
    policy: PolicyForward,
    model: nn.Module,
    pairs: Sequence[PreferencePair],
    packs: bool,
    processor_outputs: PlainOutputs,
    rewards: bool = False,
) -> SelfCheck:
    """
    Measures a policy on the completions of the pairs with the longest and the shortest prompts, and of the first pair
    with media in answers.

    See [`check_sequences`] for arguments and errors. `processor_outputs` also takes the column of a completion with
    media, and then returns the outputs for prompt and completion. In packed rows, both completions share one prompt.
    With `rewards`, the scores of a reward model are compared in place of log-probabilities. The rows of scores are in
    the order of pairs, the chosen completion of a pair first.
    """
    measure = Measure(policy, model, has_engine_positions=False)
    targets, donors, rows = _cases(measure, pairs, processor_outputs)
    answers = _media_answers(measure, pairs, processor_outputs)
    rows = [*rows, *dict.fromkeys(pair for pair, _, _ in answers)]
    outputs_of_answers = {(pair, column): outputs for pair, column, outputs in answers}
    # Two sequences per pair: the prompt with the chosen, and with the rejected completion
    sequences = [
        _with_outputs(sequence, outputs_of_answers.get((pair, column)))
        for pair in rows
        for column, sequence in zip(COMPLETIONS, pair.sequences(measure.model), strict=True)
    ]
    completions = [torch.tensor(ids, dtype=torch.long) for pair in rows for ids in (pair.chosen, pair.rejected)]
    ids, mask = (tensor.to(measure.device) for tensor in padded(completions))
    is_last = torch.arange(ids.size(1), device=ids.device) >= mask.sum(1, keepdim=True) - _N_COMPARED
    learned = [pair.learned(column) for pair in rows for column in COMPLETIONS]
    learned = pad_sequence(learned, batch_first=True).to(measure.device)

    def score_by_model() -> torch.Tensor:
        if rewards:
            return torch.cat([measure.row_reward(row) for row in sequences])
        logps = [
            measure.row_logps(row, _N_COMPARED)[0][-len(ids) :]
            for row, ids in zip(sequences, completions, strict=True)
        ]
        return pad_sequence(logps, batch_first=True)

    def score(rows: list[Any], packed: bool) -> torch.Tensor:
        pairs_and_answers = [(pair, pair.answers.get(column)) for pair in rows for column in COMPLETIONS]
        prompts = [with_answer(measure.model, pair, answer) for pair, answer in pairs_and_answers]
        if rewards:
            batch = prompts, ids, mask
            return policy.rewards(model, batch, packed=packed, fallbacks=measure.fallbacks).values
        request = ScoreRequest(prompts, ids, mask, packed=packed)
        return policy.score(model, request, fallbacks=measure.fallbacks).logps

    cases = targets, donors, rows
    # A reward model gives one score per row
    return _compare(
        measure, cases, score_by_model, score, mask[:, :1] > 0 if rewards else learned & is_last, packs, answers
    )


def _media_answers(
    measure: Measure, pairs: Sequence[PreferencePair], processor_outputs: PlainOutputs
) -> list[MediaAnswer]:
    """Returns the answers with media of the first pair that has such answers, and the processor's outputs."""
    first_with_media = next(((i, pair) for i, pair in enumerate(pairs) if pair.answers), None)
    holders = [rank for rank, holds in enumerate(gather_object([first_with_media is not None])) if holds]
    if not holders:
        return []
    is_holder = measure.accelerator.process_index == holders[0]

    def answers_with_outputs() -> list[MediaAnswer]:
        if not is_holder or first_with_media is None:
            return []
        # A copy, as on other ranks. `check_pairs` looks for the pair in its rows by identity, so the original could
        # match two rows on this rank, and only one on other ranks.
        index, pair = first_with_media[0], replace(first_with_media[1])
        return [(pair, column, processor_outputs(index, column)) for column in pair.answers]

    subject = "its processor, as `AutoProcessor.from_pretrained` loads it,"
    return broadcast_object_list([measure.require(subject, answers_with_outputs)], from_process=holders[0])[0]


def _compare(
    measure: Measure,
    cases: Cases,
    score_by_model: Callable[[], torch.Tensor],
    score: Callable[[list[Any], bool], torch.Tensor],
    mask: torch.Tensor,
    packs: bool,
    answers: Sequence[MediaAnswer] = (),
) -> SelfCheck:
    """
    Compares padded and packed scores with the model's own forward, media tensors with the processor's, and scores with
    scores under other media. Only scores where `mask` is true count. `answers` are one pair's answers with media.
    """
    (targets, donors, rows), feature_differences, effects = cases, list[float](), dict[str, float]()
    for ours, processor_outputs in ((case.prompt.media, case.plain) for case in targets if case.prompt.media):
        feature_differences.append(
            measure.compare_features(
                ours, {name: processor_outputs[name] for name in ours.keys() & processor_outputs.keys()}
            )
        )
    with measurement_mode(measure.prepared, measure.device):
        truth = measure.require("the model's forward", score_by_model)
        noise = functools.cache(lambda: measure.noise(score_by_model, mask))
        score_rows = functools.partial(score, rows)
        scores, padded, packed = measure.settle_fallbacks(
            score_rows, truth, mask, noise, packs_rows=packs, tries_isolation=True
        )

        # Rows and answers with media, each with a function that puts a replacement into the list of rows
        rows_with_media = [(case.prompt, functools.partial(_replace_row, rows, case.prompt)) for case in targets]
        for pair, column, _ in answers:
            rows_with_media.append((pair.answers[column], functools.partial(_replace_answer, rows, pair, column)))
        for row, put_into_rows in rows_with_media:

            def score_other(
                other: EncodedPrompt, put_into_rows: Callable[[EncodedPrompt], list[Any]] = put_into_rows
            ) -> torch.Tensor:
                return score(put_into_rows(other), False)

            for modality in sorted(row.modalities - effects.keys()):
                effects[modality] = measure.effect(modality, row, donors.get(modality), score_other, scores, mask)
    facts = {"tolerance": measure.tolerance, "fallbacks": measure.fallbacks, "media": effects}
    return SelfCheck(features=max(feature_differences, default=None), padded=padded, packed=packed, **facts)


def _with_outputs(row: SupervisedSequence, outputs: dict[str, torch.Tensor] | None) -> SupervisedSequence:
    """Returns a row with the media of a processor's outputs for the whole conversation, if there are outputs."""
    return row if outputs is None else replace(row, media={name: outputs[name] for name in row.media})


def _replace_row(rows: list[Any], row: EncodedPrompt, other: EncodedPrompt) -> list[Any]:
    return [other if entry is row else entry for entry in rows]


def _replace_answer(rows: list[Any], pair: PreferencePair, name: str, other: SupervisedSequence) -> list[Any]:
    return _replace_row(rows, pair, replace(pair, answers={**pair.answers, name: other}))


def _cases(measure: Measure, rows: Sequence[EncodedPrompt], processor_outputs: PlainOutputs) -> Cases:
    """
    Returns cases for comparing media; by modality, a prompt whose media replace a measured prompt's, to test their
    effect; and all rows to measure.
    """
    # Rows of text have no media, or blank ones, which aren't worth another call of the processor
    selection = measure.cases(rows, lambda i: processor_outputs(i) if rows[i].modalities else rows[i].media)
    return *selection[:2], list(dict.fromkeys([*(case.prompt for case in selection[0]), *selection[2]]))


def _compared_tokens(row: SupervisedSequence) -> torch.Tensor:
    """
    Returns the mask `(L - 1,)` of compared tokens after the first token of a row. These are the learned tokens among
    the last `_N_COMPARED` tokens, or all learned tokens if the last ones have none.
    """
    learned = row.learned & (torch.arange(len(row)) >= len(row) - _N_COMPARED)
    return (learned if learned[1:].any() else row.learned)[1:]
