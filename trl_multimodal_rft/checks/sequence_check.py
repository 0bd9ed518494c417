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

from ..encoding.join import padded
from ..encoding.prompts import EncodedPrompt
from ..encoding.sequences import PreferencePair, Side, SupervisedSequence
from ..forward.scores import ScoreRequest, with_answer
from ..models.modes import measurement_mode
from ..policy import PolicyForward
from .measure import Case, Measure
from .self_check import SelfCheck
from .targets import longer_than_windows


_N_COMPARED = 256  # maximum number of compared tokens of a row, few enough for their logits to fit into memory

# Function of the index of a row, and optionally of the column (`chosen` or `rejected`) of a completion with media. It
# returns the outputs of the processor, as `AutoProcessor` loads it, for this row and completion
ProcessorOutputs = Callable[..., dict[str, torch.Tensor]]
# A preference pair, its completion with media, and the processor's outputs for prompt and completion
MediaCompletion = tuple[PreferencePair, Side, dict[str, torch.Tensor]]
# Prompts to compare with the processor; by modality, a donor of other media, which test whether media have an effect;
# and all rows to measure
Cases = tuple[list[Case], dict[str, EncodedPrompt], list[Any]]


def check_sequences(
    policy: PolicyForward,
    model: nn.Module,
    sequences: Sequence[SupervisedSequence],
    processor_outputs: ProcessorOutputs,
) -> SelfCheck:
    """
    Measures a policy on the longest and the shortest rows of all ranks, without changing it. `processor_outputs` takes
    an index and returns what the processor, as `AutoProcessor` loads it, gives for that row. Raises a `RuntimeError`
    if no fallback makes scores exact, or if other media give the same scores.
    """
    measure = Measure(policy, model, has_engine_positions=False)
    cases = _cases(measure, sequences, processor_outputs)
    rows = cases[2]
    ids = pad_sequence([row.input_ids[1:] for row in rows], batch_first=True).to(measure.device)
    masks = [_compared_tokens(row) for row in rows]
    mask = pad_sequence(masks, batch_first=True).to(measure.device)
    # Numbers of tokens from the first compared one to the end of a row
    lengths = [len(row_mask) - int(row_mask.int().argmax()) for row_mask in masks]

    def score_by_model() -> torch.Tensor:
        logps = [measure.row_logps(row, n)[0] for row, n in zip(rows, lengths, strict=True)]
        return pad_sequence(logps, batch_first=True)

    def score(rows: list[Any], packed: bool) -> torch.Tensor:
        # `whole`, since the rows hold their completions
        request = ScoreRequest(rows, ids, mask.long(), packed=packed, whole=True)
        return policy.score(model, request, fallbacks=measure.fallbacks).logps

    return _compare(measure, cases, score_by_model, score, mask)


def check_pairs(
    policy: PolicyForward,
    model: nn.Module,
    pairs: Sequence[PreferencePair],
    processor_outputs: ProcessorOutputs,
    rewards: bool = False,
) -> SelfCheck:
    """
    Measures, as [`check_sequences`] does, the completions of the pairs with the longest and the shortest prompts, and
    of the first pair with media in completions. For those, `processor_outputs` also takes the column. With `rewards`,
    the scores of a reward model are compared, the chosen completion of a pair first.
    """
    measure = Measure(policy, model, has_engine_positions=False)
    targets, donors, rows = _cases(measure, pairs, processor_outputs)
    media_completions = _media_completions(measure, pairs, processor_outputs)
    rows = [*rows, *dict.fromkeys(pair for pair, _, _ in media_completions)]
    # The pair also after a longer prompt, whose own masks could hide those of its completions' media
    if media_completions and measure.fallbacks.packing:
        pair, side, _ = media_completions[0]
        assert side.answer is not None
        longer_pair = longer_than_windows(measure.model, pair, side.answer)
        rows += [] if longer_pair is None else [longer_pair]
    outputs_of_completions = {(pair, side): outputs for pair, side, outputs in media_completions}
    # A sequence per completion: the prompt with it
    sequences = []
    completions = []
    learned = []
    for pair, side in _compared_sides(rows):
        outputs = outputs_of_completions.get((pair, side))
        sequences.append(_with_outputs(pair.sequence(side, measure.model), outputs))
        completions.append(torch.tensor(side.ids, dtype=torch.long))
        learned.append(side.learned)
    ids, mask = (tensor.to(measure.device) for tensor in padded(completions))
    is_last = torch.arange(ids.size(1), device=ids.device) >= mask.sum(1, keepdim=True) - _N_COMPARED
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
        prompts = [
            with_answer(measure.model, pair.prompt_before(side), side.answer) for pair, side in _compared_sides(rows)
        ]
        if rewards:
            batch = prompts, ids, mask
            return policy.rewards(model, batch, packed=packed, fallbacks=measure.fallbacks).values
        request = ScoreRequest(prompts, ids, mask, packed=packed)
        return policy.score(model, request, fallbacks=measure.fallbacks).logps

    cases = targets, donors, rows
    compared = mask[:, :1] > 0 if rewards else learned & is_last  # a reward model gives one score per row
    return _compare(measure, cases, score_by_model, score, compared, media_completions)


def _media_completions(
    measure: Measure, pairs: Sequence[PreferencePair], processor_outputs: ProcessorOutputs
) -> list[MediaCompletion]:
    """Returns the completions with media of the first pair that has such completions, and the processor's outputs."""
    with_media = [(i, pair) for i, pair in enumerate(pairs) if pair.sides_with_media]
    # Preferably after a prompt of text, whose masks only the completions change
    first_with_media = min(with_media, key=lambda entry: bool(entry[1].media), default=None)
    holders = [rank for rank, holds in enumerate(gather_object([first_with_media is not None])) if holds]
    if not holders:
        return []
    is_holder = measure.accelerator.process_index == holders[0]

    def completions_with_outputs() -> list[MediaCompletion]:
        if not is_holder or first_with_media is None:
            return []
        # Other ranks receive a copy. So that this rank does the same, it copies the pair, too: `check_pairs` replaces
        # rows by identity, and the original may already be one of the measured rows.
        index = first_with_media[0]
        pair = replace(first_with_media[1])
        return [(pair, side, processor_outputs(index, side.column)) for side in pair.sides_with_media]

    subject = "its processor, as `AutoProcessor.from_pretrained` loads it,"
    return broadcast_object_list([measure.require(subject, completions_with_outputs)], from_process=holders[0])[0]


def _compare(
    measure: Measure,
    cases: Cases,
    score_by_model: Callable[[], torch.Tensor],
    score: Callable[[list[Any], bool], torch.Tensor],
    mask: torch.Tensor,
    media_completions: Sequence[MediaCompletion] = (),
) -> SelfCheck:
    """
    Compares padded and packed scores with the model's own forward, media tensors with the processor's, and scores with
    scores under other media. Only scores where `mask` is true count. `media_completions` are those of one pair.
    """
    targets, donors, rows = cases
    feature_differences = list[float]()
    effects = dict[str, float]()
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
        scores, padded_difference, packed_difference = measure.settle_fallbacks(
            score_rows, truth, mask, noise, tries_isolation=True
        )

        # Rows and completions with media, and for each a function that puts a replacement into the list of rows
        rows_with_media = [(case.prompt, functools.partial(_replace_row, rows, case.prompt)) for case in targets]
        for pair, side, _ in media_completions:
            assert side.answer is not None
            rows_with_media.append((side.answer, functools.partial(_replace_completion, rows, pair, side)))
        for row, put_into_rows in rows_with_media:

            def score_other(
                other: EncodedPrompt, put_into_rows: Callable[[EncodedPrompt], list[Any]] = put_into_rows
            ) -> torch.Tensor:
                return score(put_into_rows(other), False)

            for modality in sorted(row.modalities - effects.keys()):
                effects[modality] = measure.effect(modality, row, donors.get(modality), score_other, scores, mask)
    return SelfCheck(
        features=max(feature_differences, default=None),
        padded=padded_difference,
        packed=packed_difference,
        tolerance=measure.tolerance,
        fallbacks=measure.fallbacks,
        media=effects,
    )


def _compared_sides(pairs: Sequence[PreferencePair]) -> list[tuple[PreferencePair, Side]]:
    """Returns completions in the order of pairs. A third side, under a view, isn't compared."""
    compared = []
    for pair in pairs:
        compared += [(pair, side) for side in pair.sides[:2]]
    return compared


def _with_outputs(row: SupervisedSequence, outputs: dict[str, torch.Tensor] | None) -> SupervisedSequence:
    return row if outputs is None else replace(row, media={name: outputs[name] for name in row.media})


def _replace_row(rows: list[Any], row: EncodedPrompt, other: EncodedPrompt) -> list[Any]:
    return [other if entry is row else entry for entry in rows]


def _replace_completion(rows: list[Any], pair: PreferencePair, side: Side, other: SupervisedSequence) -> list[Any]:
    sides = [replace(side, answer=other) if entry is side else entry for entry in pair.sides]
    return _replace_row(rows, pair, replace(pair, sides=sides))


def _cases(measure: Measure, rows: Sequence[EncodedPrompt], processor_outputs: ProcessorOutputs) -> Cases:
    # Rows of text have no media, or blank ones, which aren't worth another call of the processor
    targets, donors, partners = measure.cases(
        rows, lambda i: processor_outputs(i) if rows[i].modalities else rows[i].media
    )
    return targets, donors, list(dict.fromkeys([*(case.prompt for case in targets), *partners]))


def _compared_tokens(row: SupervisedSequence) -> torch.Tensor:
    """
    Returns the mask `(L - 1,)` of compared tokens after the first token of a row. These are the learned tokens among
    the `_N_COMPARED` tokens up to the last learned one.
    """
    learned = row.learned[1:]
    index = torch.arange(len(learned))
    return learned & (index > (learned * index).max() - _N_COMPARED)
