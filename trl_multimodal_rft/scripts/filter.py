# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Keeps the rows of a dataset whose answers need their medium, see `trl-multimodal-rft filter --help`."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from trl import ModelConfig

from ..data.folders import check_empty, write_folder
from ..data.rules import MediaRules
from ..evaluation import EvaluationConfig, EvaluationResult
from .arguments import RFTScriptArguments
from .evaluate import EvaluationArguments, evaluate_by_name


# In the folder of the rows
REPORT = "filter.json"


@dataclass
class FilterArguments(EvaluationArguments):
    """Which rows to keep."""

    min_accuracy_with: float = field(
        default=0.5, metadata={"help": "Minimum share of correct answers with the medium."}
    )
    max_accuracy_without: float = field(
        default=0.25, metadata={"help": "Maximum share of correct answers without the medium."}
    )
    output_dir: str = field(
        default="outputs/filter", metadata={"help": "Empty folder for the kept rows and the report."}
    )


def why_dropped(
    record: dict[str, Any], medium: str, min_accuracy_with: float, max_accuracy_without: float
) -> str | None:
    """Why a row's answer doesn't need its medium; `None` if it does."""
    if record["correct_without"] is None:
        return f"no {medium}"
    accuracy_with, accuracy_without = _share(record["correct"]), _share(record["correct_without"])
    if accuracy_with is None or accuracy_without is None:
        return "not scored"
    if accuracy_without > max_accuracy_without:
        return f"correct without the {medium}"
    if accuracy_with < min_accuracy_with:
        return f"wrong with the {medium}"
    return None


def _share(correct: Sequence[bool | None] | None) -> float | None:
    return None if correct is None or None in correct else sum(map(bool, correct)) / len(correct)


def _report(result: EvaluationResult, dropped: dict[int, str], args: FilterArguments) -> dict[str, Any]:
    """The content of `filter.json`."""
    records = {record["index"]: record for record in result.rows}
    n_rows = len(result.rows) + len(result.skipped)
    return {
        "rows": n_rows,
        "kept": n_rows - len(dropped),
        "dropped": dict(Counter(dropped.values()).most_common()),
        "min_accuracy_with": args.min_accuracy_with,
        "max_accuracy_without": args.max_accuracy_without,
        "metrics": result.metrics,
        "settings": result.settings,
        "unreadable": result.skipped,
        "dropped_rows": [
            {
                "row": index,
                "reason": reason,
                "accuracy_with": _share(records.get(index, {}).get("correct")),
                "accuracy_without": _share(records.get(index, {}).get("correct_without")),
            }
            for index, reason in sorted(dropped.items())
        ],
    }


def _text(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    settings, metrics = report["settings"], report["metrics"]
    medium = settings["ablate"]
    lines = [
        f"{settings['dataset']}, split {settings['split']}: {report['kept']} of {report['rows']} rows need their "
        f"{medium} ({settings['ablate_with']} in its place).",
        *(f"- {count} dropped: {reason}" for reason, count in report["dropped"].items()),
    ]
    for label, name in (
        (f"accuracy with {medium}", f"accuracy_with_{medium}"),
        (f"accuracy without {medium}", f"accuracy_without_{medium}"),
        ("contribution", f"{medium}_contribution"),
    ):
        value, low, high = (metrics[f"{name}{end}"] for end in ("", "_low", "_high"))
        interval = "" if low is None else f" ({low:.1%} to {high:.1%})"
        lines.append(f"- {label}: " + ("none" if value is None else f"{value:.1%}{interval}"))
    return "\n".join(lines)


ARGUMENTS = (RFTScriptArguments, FilterArguments, EvaluationConfig, ModelConfig)


def main(
    script_args: RFTScriptArguments,
    filter_args: FilterArguments,
    config: EvaluationConfig,
    model_args: ModelConfig,
) -> None:
    """Answers the training split with and without a medium, and saves the rows that need it with a report."""
    medium = config.ablate
    if medium is None:
        raise ValueError("Name the medium that answers need: set `--ablate` to audio, image or video.")
    check_empty(filter_args.output_dir)
    accelerator = Accelerator()
    arguments = script_args, filter_args, config, model_args
    dataset, result = evaluate_by_name(*arguments, script_args.dataset_train_split, accelerator)
    thresholds = filter_args.min_accuracy_with, filter_args.max_accuracy_without
    reasons = {record["index"]: why_dropped(record, medium, *thresholds) for record in result.rows}
    dropped = dict.fromkeys(result.skipped, "can't be read")
    dropped |= {index: reason for index, reason in reasons.items() if reason is not None}
    report = _report(result, dropped, filter_args)
    accelerator.print(_text(report))
    if not report["kept"]:
        raise ValueError("No row is left, so nothing is written; change the thresholds or the model.")
    if accelerator.is_main_process:
        kept = [index for index in range(len(dataset)) if index not in dropped]
        write_folder(dataset.select(kept), filter_args.output_dir, MediaRules(media_dir=filter_args.media_dir))
        Path(filter_args.output_dir, REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    accelerator.end_training()
