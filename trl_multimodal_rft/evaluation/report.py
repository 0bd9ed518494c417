# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What an evaluation found, in a few lines."""

from typing import Any

from .evaluator import EvaluationResult


_N_ANSWERS = 3
_LONGEST = 200  # characters of a text


def summary(result: EvaluationResult) -> str:
    """
    Metrics, shares in per cent with their intervals, and some answers, wrong ones among them where there are any.
    """
    metrics = result.metrics
    lines = []
    for name, value in metrics.items():
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in metrics:
            continue
        if f"{name}_low" not in metrics:
            lines.append(f"{name} {_number(name, value)}")
            continue
        low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
        level = f"{100 * result.settings['confidence']:.4g} %"
        interval = "" if low is None or high is None else f" ({level}: {100 * low:.1f} to {100 * high:.1f} %)"
        counted = f", {metrics['scored_rows']} rows" if name == "accuracy" else ""
        lines.append(f"{name} {_per_cent(value)}{interval}{counted}")
    return "\n".join([*lines, *map(_answer, _some(result.rows))])


def _number(name: str, value: float | None) -> str:
    if name.startswith(("accuracy", "truncated")):
        return _per_cent(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _per_cent(value: float | None) -> str:
    return "of no rows" if value is None else f"{100 * value:.1f} %"


def _some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    right = [row for row in rows if row["correct"][0]]
    wrong = [row for row in rows if not row["correct"][0]]
    some = [*wrong[: _N_ANSWERS - 1], *right[:_N_ANSWERS], *wrong[_N_ANSWERS - 1 :]][:_N_ANSWERS]
    return sorted(some, key=lambda row: row["index"])


def _answer(row: dict[str, Any]) -> str:
    verdict = {None: "not scored", True: "right", False: "wrong"}[row["correct"][0]]
    question = row["prompt"].rpartition("\nuser: ")[2]
    shown = {"prompt": question, "reference": row.get("solution"), "completion": row["completions"][0]}
    texts = [f"    {name}: {_short(str(text))}" for name, text in shown.items() if text is not None]
    return "\n".join([f"row {row['index']}: {verdict}", *texts])


def _short(text: str) -> str:
    """One line, the end of a long text, where prompts ask and completions answer."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"
