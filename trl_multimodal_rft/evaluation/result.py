# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The result of an evaluation: metrics from the records of rows, saved files, and a short summary."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset

from ..credentials import without_secrets
from ..rewards.ready.choices import vote_of
from ..rollout.turns import LIMITS
from .config import EvaluationConfig
from .metrics import majority_at_k, mean_interval, paired_interval, pass_at_k, wilson_interval


# Key of the `group_by` value in a record, until the metrics are computed
GROUP = "\0group"

_VERSIONS = ("trl-multimodal-rft", "trl", "transformers", "torch", "accelerate", "datasets")
_N_METRICS = 8  # maximum number of lines of metrics in a `repr`
_N_ANSWERS = 3  # maximum number of answers in a summary
_LONGEST_TEXT = 200  # maximum length of a text in a summary, in characters


@dataclass
class EvaluationResult:
    """
    The result of an evaluation, the same on each process.

    Args:
        metrics (`dict[str, float | None]`):
            Metrics by name. A metric is `None` if there are no values for a mean, or too few for an interval.
            `<metric>_low` and `<metric>_high` are the ends of a confidence interval.

            - With intervals: `accuracy` of all completions (pass@1), `pass@k`, `majority@k`, and `accuracy/<value>` of
              each value of `group_by`.
            - `reward/<name>`: mean of a reward function. `metric/<name>`: mean over batches of the values that reward
              functions passed to `log_metric`.
            - `completion_length` in tokens, and `truncated`, the share of completions that didn't end.
            - `rows`, and `scored_rows`, the rows in which the first reward function scored all completions. With
              `on_media_error="skip"`, also `skipped_rows`, the unreadable rows, which aren't counted.
            - With a `speech_decoder`: `speech/seconds` of a sound, and `speech/undecodable`, the share of completions
              without a sound.
            - With tools: `tools/call_frequency` (calls per completion), `tools/failure_frequency` (share of calls),
              `tools/unparsed_frequency` (calls that can't be parsed, per completion), `tools/ended_by_length`,
              `tools/ended_by_turns` and `tools/ended_by_media` (shares of completions), and
              `tools/environment_failures` (number of completions without a reward because their environment failed).
            - With `ablate="audio"`, for the rows with audio whose completions with and without it were all scored:
              `accuracy_with_audio`, `accuracy_without_audio`, and their difference `audio_contribution`, all with
              intervals, see [`~evaluation.paired_interval`]; and `audio_rows`, the number of these rows.
        rows (`list[dict]`):
            Records of the rows, in the order of the dataset. A record has:

            - `index`, and `prompt` as text, in which tags such as `"<audio>"` stand for media;
            - `fingerprint`, a checksum of the prompt's media, if there are any;
            - lists with an entry for each completion: `completions`, `extracted_answers`, `correct`,
              `completion_lengths`, `truncated`, `reward/<name>`, and `extra/<name>`, the values that functions passed
              to `log_extra`;
            - with a `speech_decoder`, the list `speech_seconds`, `None` without a sound;
            - with tools, the lists `tool_calls`, `tool_failures`, `unparsed_calls`, `environment_failures` (reasons)
              and `ended_by`, while `completions` are whole conversations as text;
            - with `ablate`, the lists `completions_without` and `correct_without`, `None` if the prompt has no media
              of this modality;
            - the dataset's other columns, if they hold text and numbers and have none of these names.
        settings (`dict`):
            Options, model and reward functions of the evaluation.
        skipped (`dict[int, str]`):
            The reason for each unreadable row, by its index.
    """

    metrics: dict[str, float | None]
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    skipped: dict[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = metric_lines(self.metrics, self.settings)
        omission = [f"... and {len(lines) - _N_METRICS} more in `metrics`"] * (len(lines) > _N_METRICS)
        return "\n  ".join([f"EvaluationResult of {len(self.rows)} rows:", *lines[:_N_METRICS], *omission])

    def save(self, folder: str | Path) -> None:
        """
        Writes `metrics.json` (metrics, settings and versions) and `rows.parquet`, on the main process alone.

        Args:
            folder (`str` or `Path`):
                Folder to write to, created if needed.
        """
        if not PartialState().is_main_process:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        versions = {name: version(name) for name in _VERSIONS}
        settings = without_secrets(self.settings)
        content = {"metrics": self.metrics, "settings": settings, "versions": versions, "skipped": self.skipped}
        (folder / "metrics.json").write_text(json.dumps(content, indent=2) + "\n")
        Dataset.from_list(self.rows).to_parquet(folder / "rows.parquet")


def aggregate(
    records: list[dict[str, Any]], reward_names: Iterable[str], args: EvaluationConfig
) -> dict[str, float | None]:
    """
    Computes the metrics of an [`EvaluationResult`] from the records of its rows. Accuracies count the rows in which
    the first reward function scored all completions.
    """
    scored_records = [record for record in records if None not in record["correct"]]
    n = len(scored_records[0]["correct"]) if scored_records else args.num_samples
    # `n` is the number of completions per row, and `n_right` has the number of right completions of each row
    n_right = np.array([sum(record["correct"]) for record in scored_records])
    metrics: dict[str, float | None] = {}

    def add(name: str, values: np.ndarray, is_binary: bool) -> None:
        metrics.update(estimate(name, values, is_binary, args.confidence))

    add("accuracy", n_right / n, is_binary=n == 1)
    for k in args.pass_at:
        add(f"pass@{k}", pass_at_k(n, n_right, k), is_binary=k == n)
    for k in args.majority_at or ():
        # Answers agree if they differ only in case, whitespace or punctuation, or are the same number. With fewer than
        # `2 * k` completions, a row has a single block of `k`, whose majority is right (1) or wrong (0).
        answers = [
            [vote_of(answer, record.get("choices")) for answer in record["extracted_answers"]]
            for record in scored_records
        ]
        add(
            f"majority@{k}",
            majority_at_k(answers, [record["correct"] for record in scored_records], k),
            is_binary=n < 2 * k,
        )
    if args.group_by is not None:
        for value in sorted({record[GROUP] for record in scored_records}):
            indices = [i for i, record in enumerate(scored_records) if record[GROUP] == value]
            add(f"accuracy/{value}", n_right[indices] / n, is_binary=n == 1)
    if args.ablate is not None:
        # Rows with media of the modality, whose completions with and without it were all scored
        ablated_records = [record for record in scored_records if None not in (record["correct_without"] or [None])]
        shares = [
            np.array([sum(record[name]) / n for record in ablated_records]) for name in ("correct", "correct_without")
        ]
        for name, values in zip(("with", "without"), shares, strict=True):
            add(f"accuracy_{name}_{args.ablate}", values, is_binary=n == 1)
        contribution = shares[0] - shares[1]
        name = f"{args.ablate}_contribution"
        metrics |= {name: mean(contribution), f"{name}_low": None, f"{name}_high": None}
        if ablated_records:
            metrics[f"{name}_low"], metrics[f"{name}_high"] = paired_interval(contribution, args.confidence)
        metrics[f"{args.ablate}_rows"] = len(ablated_records)
    for name in reward_names:
        metrics[f"reward/{name}"] = mean(flat(record[f"reward/{name}"] for record in records))
    for name, column in (("completion_length", "completion_lengths"), ("truncated", "truncated")):
        # Records of preference pairs lack these columns, as their completions aren't sampled
        if not records or column in records[0]:
            metrics[name] = mean(flat(record[column] for record in records))
    if records and "speech_seconds" in records[0]:
        seconds = [*chain.from_iterable(record["speech_seconds"] for record in records)]
        metrics["speech/seconds"] = mean(flat([seconds]))
        metrics["speech/undecodable"] = seconds.count(None) / len(seconds)
    if records and "ended_by" in records[0]:
        calls, failures = (sum(flat(record[f"tool_{name}"] for record in records)) for name in ("calls", "failures"))
        ends = [*chain.from_iterable(record["ended_by"] for record in records)]
        metrics["tools/call_frequency"] = calls / len(ends)
        metrics["tools/failure_frequency"] = failures / calls if calls else 0.0
        metrics["tools/unparsed_frequency"] = sum(flat(record["unparsed_calls"] for record in records)) / len(ends)
        metrics["tools/environment_failures"] = len(flat(record["environment_failures"] for record in records))
        metrics |= {f"tools/ended_by_{limit}": ends.count(limit) / len(ends) for limit in LIMITS}
    return {**metrics, "rows": len(records), "scored_rows": len(scored_records)}


def estimate(name: str, values: np.ndarray, is_binary: bool, confidence: float) -> dict[str, float | None]:
    """Returns the mean of values in [0, 1], one per row, with its interval. If `is_binary`, all values are 0 or 1."""
    low = high = None
    if len(values) and is_binary:
        low, high = wilson_interval(int(values.sum()), len(values), confidence)
    elif len(values) > 1:
        low, high = np.clip(mean_interval(values, confidence), 0.0, 1.0).tolist()
    return {name: mean(values), f"{name}_low": low, f"{name}_high": high}


def gains(result: EvaluationResult, folder: str | Path) -> dict[str, float | None]:
    """
    Returns the gains of a result over a saved result of the same rows, with paired confidence intervals.

    Raises `ValueError` if the folder has a result of other rows.
    """
    base_rows = Dataset.from_parquet(str(Path(folder, "rows.parquet")), keep_in_memory=True).to_list()
    for column in ("prompt", "solution", "fingerprint"):
        columns = [[row.get(column) for row in rows] for rows in (base_rows, result.rows)]
        # A result may lack solutions or fingerprints; these columns are compared only if both results have values
        if columns[0] != columns[1] and (
            column == "prompt" or not any(all(value is None for value in values) for values in columns)
        ):
            index = next((i for i, (a, b) in enumerate(zip(*columns, strict=False)) if a != b), min(map(len, columns)))
            content = {"prompt": "prompts", "solution": "solutions", "fingerprint": "media"}[column]
            raise ValueError(
                f"`compare_with` is {str(folder)!r}, which has other {content}, first in row {index}; name the "
                "`output_dir` of an evaluation of these rows."
            )
    metrics: dict[str, float | None] = {}
    if "accuracy_low" in result.metrics:  # the only metric with an interval whose values per row are saved
        scores = [[np.mean(np.array(row.get("correct"), float)) for row in rows] for rows in (result.rows, base_rows)]
        differences = np.array(scores[0]) - np.array(scores[1])
        differences = differences[~np.isnan(differences)]
        if len(differences):
            low, high = paired_interval(differences, result.settings["confidence"])
            metrics |= {"accuracy_gain": mean(differences), "accuracy_gain_low": low, "accuracy_gain_high": high}
    return metrics


def mean(values: Sequence[float] | np.ndarray) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None


def flat(values: Iterable[list]) -> list:
    """Returns the values of all lists, except `None`."""
    return [value for value in chain.from_iterable(values) if value is not None]


def summary(result: EvaluationResult) -> str:
    """Returns the lines of metrics and a few answers, among them wrong or unscored ones if there are any."""
    right = [row for row in result.rows if row["correct"][0]]
    wrong = [row for row in result.rows if not row["correct"][0]]
    examples = [*wrong[: _N_ANSWERS - 1], *right[:_N_ANSWERS], *wrong[_N_ANSWERS - 1 :]][:_N_ANSWERS]
    lines = metric_lines(result.metrics, result.settings)
    return "\n".join([*lines, *map(_answer_lines, sorted(examples, key=lambda row: row["index"]))])


def metric_lines(metrics: dict[str, float | None], settings: dict[str, Any]) -> list[str]:
    """Returns a line per metric. Shares are in per cent, with their confidence intervals."""
    lines = []
    for name, value in metrics.items():
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in metrics:
            continue
        if f"{name}_low" in metrics:
            low = metrics[f"{name}_low"]
            high = metrics[f"{name}_high"]
            level = f"{100 * settings.get('confidence', math.nan):.4g} %"
            interval = "" if low is None or high is None else f" ({level}: {100 * low:.1f} to {100 * high:.1f} %)"
            release = settings.get("benchmark_version")
            of_version = f" of {release}" if release else ""
            scored = metrics.get("scored_rows", metrics.get("rows"))
            row_note = f", {scored} rows{of_version}" if name == "accuracy" else ""
            text = f"{_per_cent(value)}{interval}{row_note}"
        elif name.startswith(("accuracy", "truncated")):
            text = _per_cent(value)
        else:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{name} {text}")
    return lines


def _per_cent(value: float | None) -> str:
    return "of no rows" if value is None else f"{100 * value:.1f} %"


def _answer_lines(row: dict[str, Any]) -> str:
    """Of long texts only the last characters are kept."""
    verdict = {None: "not scored", True: "right", False: "wrong"}[row["correct"][0]]
    user_text = row["prompt"].rpartition("\nuser: ")[2]
    lines = [f"row {row['index']}: {verdict}"]
    text_by_name = {"prompt": user_text, "reference": row.get("solution"), "completion": row["completions"][0]}
    if "scores" in row:  # a preference pair
        scored_completions = zip(("chosen", "rejected"), row["scores"], row["completions"], strict=True)
        answers = {
            name if score is None else f"{name}, score {score:.4g}": text for name, score, text in scored_completions
        }
        text_by_name = {"prompt": user_text, **answers}
    for name, value in text_by_name.items():
        if value is not None:
            text = " ".join(str(value).split())
            lines.append(f"    {name}: {text if len(text) <= _LONGEST_TEXT else f'...{text[-_LONGEST_TEXT:]}'}")
    return "\n".join(lines)
