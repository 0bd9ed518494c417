# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Accuracy of judges and of reward models on pairs of completions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerState
from trl.trainer.utils import get_callable_name

from ..data.reading.refs import MediaError, checksum
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.batches import DatasetRows, Row
from ..data.rows.cells import truth_value
from ..data.rows.columns import as_text, rows_to_messages, strip_media
from ..data.rows.features import restore_media, restore_rows
from ..data.rows.labels import class_names, with_class_names
from ..data.rows.pairs import COMPLETIONS, TIE, check_all_is_read, check_pairs, put_answer_media, read_answer
from ..models.modes import kept_random_state
from ..progress import progress_bar
from ..rewards.calls import call_rewards, checked_reward, reward_arguments, reward_loop
from ..rewards.ready.preference import verdict_in
from .config import EvaluationConfig
from .result import GROUP, EvaluationResult, aggregate, estimate, mean


_Item = TypeVar("_Item")


# Entries of a row's record that are lists with an item for each completion
_LIST_NAMES = ("completions", "extracted_answers", "correct", "completion_lengths", "truncated", "tool_calls")
_LIST_NAMES += ("tool_failures", "unparsed_calls", "environment_failures", "ended_by")
_LIST_NAMES += ("completions_without", "correct_without", "speech_seconds")


def pair_result(result: EvaluationResult) -> EvaluationResult:
    """
    Measures a judge's accuracy and consistency on pairs, from its answers to the rows of [`~data.judge_rows`].

    Args:
        result ([`EvaluationResult`]):
            Result of [`evaluate`] on such rows with [`preference_reward`], with both orders of each pair as rows.

    Returns:
        [`EvaluationResult`]: Rows are pairs, with the completions and `verdicts` of the first order before those of
        the second. Metrics are those of [`evaluate`], and a pair is one observation: `accuracy` is the share of right
        verdicts, both orders counted. Three more metrics have confidence intervals. `consistent_accuracy` is how often
        both verdicts are right, in the pairs whose verdicts were all scored (`scored_rows`). `flips` is how often both
        verdicts name the same position, which means that the preferred answer changes with the order.
        `accuracy_without_ties` leaves out equally good pairs, if there are any. Shares of verdicts have no intervals:
        `predicted_ties`, `unreadable`, and `first_preferred` among verdicts that name a position.

    Example:
    ```python
    result = pair_result(evaluate(judge, processor, judge_rows(pairs), preference_reward))
    print(result.metrics["accuracy"], result.metrics["flips"])
    ```
    """
    args = EvaluationConfig(**{option.name: result.settings[option.name] for option in fields(EvaluationConfig)})
    # Rows `2 * i` and `2 * i + 1` hold the two orders of pair `i`. If one was unreadable, the pair is left out.
    rows_by_pair: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in result.rows:
        rows_by_pair[row["index"] // 2].append(row)
    pairs = [_join_orders(index, *rows) for index, rows in rows_by_pair.items() if len(rows) == 2]
    metrics = _pair_metrics(
        pairs, [pair["solution"] == "tie" for pair in pairs], result.settings["reward_funcs"], args
    )
    n = args.num_samples
    # As in `accuracy`, a pair counts if all its verdicts were scored
    scored_pairs = [pair for pair in pairs if None not in pair["correct"]]
    for name, column, counted_pairs, condition in (
        ("consistent_accuracy", "correct", scored_pairs, lambda first, second: first and second),
        ("flips", "verdicts", pairs, lambda first, second: first == second in ("A", "B")),
    ):
        # Completion `i` of the first order is compared with completion `i` of the second
        samples_by_pair = [zip(pair[column][:n], pair[column][n:], strict=True) for pair in counted_pairs]
        shares = np.array(
            [np.mean([condition(*both_orders) for both_orders in samples]) for samples in samples_by_pair]
        )
        metrics |= estimate(name, shares, n == 1, args.confidence)
    verdicts = [*chain.from_iterable(pair["verdicts"] for pair in pairs)]
    metrics["predicted_ties"] = mean([verdict == "tie" for verdict in verdicts])
    metrics["unreadable"] = mean([verdict is None for verdict in verdicts])
    metrics["first_preferred"] = mean([verdict == "A" for verdict in verdicts if verdict in ("A", "B")])
    skipped = {index // 2: reason for index, reason in result.skipped.items()}
    metrics |= {"skipped_rows": len(skipped)} if "skipped_rows" in result.metrics else {}
    return EvaluationResult(metrics, pairs, result.settings | {"pairs": True}, skipped)


def _join_orders(index: int, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Lists have the items of the first order before those of the second."""
    lists = [name for name in first if name in _LIST_NAMES or name.startswith(("reward/", "extra/"))]
    joined = {name: None if first[name] is None else [*first[name], *second[name]] for name in lists}
    return {**first, "index": index, **joined, "verdicts": list(map(verdict_in, joined["completions"] or ()))}


def _pair_metrics(
    pairs: list[dict[str, Any]], is_tie: list[bool], names: Sequence[str], args: EvaluationConfig
) -> dict[str, float | None]:
    records = [{**pair, GROUP: str(pair.get(str(args.group_by)))} for pair in pairs]
    metrics = aggregate(records, names, replace(args, pass_at=[], majority_at=[]))
    if any(is_tie):
        untied_verdicts = [pair["correct"] for pair, tied in zip(pairs, is_tie, strict=True) if not tied]
        shares = np.array([np.mean(correct) for correct in untied_verdicts if None not in correct])
        metrics |= estimate("accuracy_without_ties", shares, len(pairs[0]["correct"]) == 1, args.confidence)
    return metrics


def score_pairs(
    reward_func: Callable,
    dataset: Dataset,
    args: EvaluationConfig | None = None,
    *,
    tie_margin: float = 0.0,
    media_rules: MediaRules = DEFAULT_RULES,
    accelerator: Accelerator | None = None,
) -> EvaluationResult:
    """
    Measures how often a reward model scores the chosen completion of a pair higher than the rejected one.

    Args:
        reward_func (`Callable`):
            [`RewardModel`], or another reward function with TRL's signature.
        dataset ([`~datasets.Dataset`]):
            Rows of `prompt`, `chosen`, `rejected` and media; `tie` may say which pairs are equally good.
        args ([`EvaluationConfig`], *optional*):
            Options, of which `batch_size` (in pairs), `group_by`, `confidence` and `on_media_error` apply.
        tie_margin (`float`, *optional*, defaults to `0.0`):
            Largest difference of a pair's scores that predicts a tie. A predicted tie is right only if the completions
            are equally good.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            Accelerator whose processes share the pairs. By default a new accelerator.

    Returns:
        [`EvaluationResult`]: Metrics of [`pair_result`] that apply to one order, and `margin`, the mean score
        of chosen completions minus the mean score of rejected completions. Rows have the `scores` of both completions.

    Raises:
        `ValueError`: If the dataset has no pairs, or the function returns something else than a number or `None` per
            completion.

    Example:
    ```python
    result = score_pairs(RewardModel(model, processor), load_preferences("openbmb/RLAIF-V-Dataset"))
    ```
    """
    check_pairs(dataset)
    args = args or EvaluationConfig()
    accelerator = accelerator or Accelerator()
    dataset = with_class_names(dataset, [TIE])
    func_name = get_callable_name(reward_func)
    table = DatasetRows(dataset)
    skips_rows = args.on_media_error == "skip"
    indices = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    # If unreadable rows are skipped, a batch is one pair, so that other pairs aren't skipped with it
    pairs = []
    skipped = {}
    batch_size = 1 if skips_rows else args.batch_size
    bar = progress_bar(len(indices), "evaluate", "pair")
    with kept_random_state(), torch.no_grad(), reward_loop([reward_func]) as loop, bar:
        for batch in (table.__getitems__([*indices[i : i + batch_size]]) for i in range(0, len(indices), batch_size)):
            bar.update(len(batch))
            row_indices = _per_completion([row.row_index for row in batch])
            try:
                placed_rows = [put_answer_media(row, rules=media_rules) for row in batch]
                arguments = _arguments(batch, placed_rows, media_rules)
                functions = {func_name: checked_reward(reward_func, func_name, media_rules, row_indices)}
                scores = call_rewards(functions, arguments, loop)[func_name]
            except MediaError as error:
                if not skips_rows:
                    raise
                skipped[row_indices[0]] = str(error)
                continue
            conversations = [  # prompt, chosen and rejected completion of each pair
                [row[name] for name in ("prompt", *COMPLETIONS)]
                for row in rows_to_messages(placed_rows, rules=media_rules)
            ]
            # Scores of a pair are neighbors: chosen completion, rejected completion
            for i, row, messages in zip(range(0, len(scores), 2), batch, conversations, strict=True):
                prompt, *texts = (as_text(strip_media(chat)) for chat in messages)
                pair: dict[str, Any] = {"index": row.row_index, "prompt": prompt, "fingerprint": checksum(messages)}
                pair["completions"] = texts
                pair |= _outcome(scores[i], scores[i + 1], truth_value(row.get(TIE), TIE, row.row_index), tie_margin)
                pairs.append({name: class_names(row.get(name)) for name in {args.group_by} - {None}} | pair)
    pairs = sorted(gather_object(pairs), key=lambda pair: pair["index"])
    skipped = dict(gather_object([*skipped.items()]))
    metrics = _pair_metrics(pairs, [pair[TIE] for pair in pairs], (), args)
    scored = [pair for pair in pairs if None not in pair["scores"]]
    metrics["margin"] = mean([pair["scores"][0] - pair["scores"][1] for pair in scored if not pair[TIE]])
    metrics["predicted_ties"] = mean([pair["predicted_tie"] for pair in scored])
    metrics |= {"skipped_rows": len(skipped)} if skips_rows else {}
    settings = {**asdict(args), "reward_funcs": [func_name], "tie_margin": tie_margin, "pairs": True}
    return EvaluationResult(metrics, pairs, settings, skipped)


def _arguments(batch: Sequence[Row], placed_rows: Sequence[Row], media_rules: MediaRules) -> dict[str, Any]:
    """
    Returns the arguments of a reward function, as trainers pass them. Two pairs give the completions chosen, rejected,
    chosen, rejected, and repeat each prompt and column value. `placed_rows` is the batch after [`put_answer_media`]:
    a row whose answers hold media has its media in messages, and no media columns.
    """
    for row in batch:
        for name in COMPLETIONS:
            check_all_is_read(read_answer(row[name], name, row.row_index), name, row.row_index)
    prompts = restore_media([row["prompt"] for row in rows_to_messages(placed_rows, rules=media_rules)])
    # Columns of the batch's rows, except completions and the media columns that `put_answer_media` moved
    rows = [
        {name: value for name, value in row.items() if name in placed_rows[i] and name not in COMPLETIONS}
        for i, row in enumerate(restore_rows(batch, media_rules))
    ]
    completions: list = []
    for row, original in zip(placed_rows, batch, strict=True):
        # A row that `put_answer_media` returns itself has no media in its answers
        read = strip_media if row is original else restore_media
        completions += [read(row[name]) for name in COMPLETIONS]
    if not isinstance(prompts[0], str):
        completions = [
            [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            for completion in completions
        ]
    # Token ids are unknown, and values are logged only in training
    logs = {"log_extra": lambda column, values: None, "log_metric": lambda name, value: None}
    arguments = reward_arguments(_per_completion(prompts), completions, [[]] * len(completions), _per_completion(rows))
    return {**arguments, "trainer_state": TrainerState(), **logs}


def _per_completion(items: Sequence[_Item]) -> list[_Item]:
    """Repeats the item of each pair: two pairs give their items as 0, 0, 1, 1."""
    return [*chain.from_iterable([item] * len(COMPLETIONS) for item in items)]


def _outcome(
    chosen_score: float | None, rejected_score: float | None, is_tie: bool, tie_margin: float
) -> dict[str, Any]:
    correct = predicts_tie = None
    if chosen_score is not None and rejected_score is not None:
        predicts_tie = abs(chosen_score - rejected_score) <= tie_margin
        correct = predicts_tie if is_tie else chosen_score > rejected_score and not predicts_tie
    return {"scores": [chosen_score, rejected_score], "correct": [correct], "predicted_tie": predicts_tie, TIE: is_tie}
