# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluation harnesses that send requests to a model's server: their command lines, and the scores in their files."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.rows.columns import as_text, strip_media
from ..evaluation.result import SCORE, EvaluationResult, estimate


# Requirements for `uvx --from`. Versions are exact, since result formats change between versions. filelock is older
# than 4.3, which lacks names that lmms-eval uses.
PACKAGES = {"lmms": "lmms-eval[audio,video]==0.7.3 --with filelock<4.3", "evalscope": "evalscope==1.14.1"}
PLUGIN = Path(__file__).with_name("lmms_plugin")  # a folder on the Python path of lmms-eval
_FAILED = "[LMMS_EVAL_REQUEST_FAILED"  # start of the text that lmms-eval scores if a request failed
# Some tasks of lmms-eval score a row with a dictionary. The score is its value at the first of these keys that it has.
_SCORE_KEYS = ("score", "overall", "correct", "is_correct", "accuracy", "acc", "exact_match", "true_false", "hit")

Rows = list[dict[str, Any]]


def harness_command(name: str, task: str, model: str, url: str, folder: Path) -> list[str]:
    """Returns the words of the command that runs a task against a server, with results in a folder."""
    if name == "lmms":
        words = ["lmms-eval", "eval", "--model", "openai", "--model_args", f"model={model},base_url={url}/v1"]
        # At lower levels, lmms-eval logs the Hub token
        return [*words, "--tasks", task, "--output_path", str(folder), "--log_samples", "--verbosity", "WARNING"]
    words = ["evalscope", "eval", "--eval-type", "openai_api", "--model", model, "--api-url", f"{url}/v1"]
    return [*words, "--datasets", task, "--work-dir", str(folder), "--no-timestamp"]


def read_lmms(folder: Path) -> tuple[Rows, dict[str, float]]:
    """Reads lmms-eval's rows and figures. Raises `ValueError` for failed requests, which lmms-eval counts as wrong."""
    path = next(folder.rglob("*_results.json"), None)
    if path is None:
        return [], {}
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    figures = {}
    counts = results["n-samples"]
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, _, pipeline = name.partition(",")  # a name such as "accuracy,none" ends with the filter pipeline
            if pipeline == "none" and "_stderr" not in metric and isinstance(value, (int, float)):
                figures[metric if len(counts) == 1 else f"{metric}/{task}"] = float(value)
    for task, count in counts.items():
        samples = [*_json_lines(path.with_name(path.name.replace("results.json", f"samples_{task}.jsonl")))]
        _check_complete("lmms-eval", task, [sample["doc_id"] for sample in samples], count["effective"])
        for sample in samples:
            completion = str(sample["filtered_resps"])
            if _FAILED in completion:
                raise ValueError(f"lmms-eval got no answer to row {sample['doc_id']} of {task!r}: {completion}.")
            row = {"task": task, "prompt": sample["input"], "solution": sample["target"], "completions": [completion]}
            for metric in results["higher_is_better"][task]:
                value = sample.get(metric)
                if isinstance(value, dict):
                    value = next((value[key] for key in _SCORE_KEYS if key in value), None)
                if isinstance(value, (int, float)):  # including `bool`
                    row[SCORE + (metric if len(counts) == 1 else f"{metric}/{task}")] = float(value)
            rows.append(row)
    return rows, figures


def read_evalscope(folder: Path) -> tuple[Rows, dict[str, float]]:
    """Reads EvalScope's rows and main figure. Raises `ValueError` for unscored rows, which EvalScope counts as 0."""
    path = next(folder.glob("reports/*/*.json"), None)
    if path is None:
        return [], {}
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    main_id = report["primary_metric_identity"]  # an object with a `name`
    figure = next(entry["score"] for entry in report["metrics"] if entry["identity"] == main_id)
    name = main_id["name"]
    subsets = (report.get("execution_summary") or {}).get("subsets") or {}
    for path in sorted(folder.glob("reviews/*/*.jsonl")):  # one file per subset of the task
        reviews = sorted(_json_lines(path), key=lambda review: review["index"])
        subset = subsets.get(path.stem.removeprefix(f"{report.get('dataset_name')}_"), {})
        _check_complete("EvalScope", path.stem, [review["index"] for review in reviews], subset.get("requested"))
        for review in reviews:
            # The last message is the completion
            messages = review["messages"][:-1]
            score = review["sample_score"]["score"]
            target = review["target"]
            name = score["main_score_name"] or name
            for metric, reason in (score["metadata"] or {}).get("metric_errors", {}).items():
                if name.lower().startswith(metric.lower()):
                    raise ValueError(f"EvalScope couldn't score row {review['index']} of {path.stem!r}: {reason}.")
            target = target if isinstance(target, str) else ", ".join(map(str, target))
            row = {"task": path.stem, "prompt": as_text(strip_media(messages)), "solution": target}
            rows.append({**row, "completions": [score["prediction"]], SCORE + name: float(score["value"][name])})
    return rows, {name: figure}


def _check_complete(harness: str, task: str, indices: Sequence[int], expected: int | None) -> None:
    repeated = sorted(index for index, count in Counter(indices).items() if count > 1)
    if repeated:
        raise ValueError(f"{harness} wrote row {repeated[0]} of {task!r} more than once; run it again.")
    if expected is not None and len(indices) != expected:
        raise ValueError(f"{harness} wrote {len(indices)} of {expected} rows of {task!r}; run it again.")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def harness_result(rows: Rows, figures: Mapping[str, float], settings: dict[str, Any]) -> EvaluationResult:
    """
    Returns the result of an evaluation by a harness. A figure that is the mean of row scores from 0 to 1, or 100 times
    that mean, gets a confidence interval. Other figures, such as an F1 of all rows, stay as the harness gives them.
    """
    metrics: dict[str, float | None] = {}
    for name, figure in figures.items():
        if not math.isfinite(figure):
            raise ValueError(f"The harness returns {figure} as {name!r}, which isn't finite; its log says why.")
        values = np.array([row[SCORE + name] for row in rows if SCORE + name in row])
        is_share = len(values) > 0 and bool(((values >= 0) & (values <= 1)).all())
        # Harnesses round figures, hence the tolerance
        if is_share and np.isclose(values.mean(), (figure, figure / 100), rtol=0, atol=5e-4).any():
            metrics |= estimate(name, values, bool(np.isin(values, (0, 1)).all()), settings["confidence"])
        else:
            metrics[name] = figure
    for index, row in enumerate(rows):
        score = next((value for name, value in row.items() if name.startswith(SCORE)), None)
        row |= {"index": index, "correct": [bool(score) if score in (0, 1) else None]}
    return EvaluationResult({**metrics, "rows": len(rows)}, rows, settings)
