# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft filter`: selection of a dataset's rows by a model's completions."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from trl import ModelConfig

from ..cli.arguments import RFTScriptArguments, option
from ..cli.preflight import check_ablated_modality
from ..data.reading.rules import MediaRules
from ..data.rows.difficulty import PASS_RATE
from ..evaluation import EvaluationConfig, EvaluationResult
from ..evaluation.result import metric_lines
from ..printable import printable
from .evaluate import EvaluationArguments, evaluate_by_name
from .prepare.folders import check_empty, write_folder


# File name of the report, in the folder of the kept rows
REPORT = "filter.json"

# Defaults for `--by accuracy`: completions per row, and their temperature
_SAMPLES = 8
_TEMPERATURE = 1.0


@dataclass
class FilterArguments(EvaluationArguments):
    """Criteria for the rows to keep, and the folder for these rows."""

    by: Literal["accuracy", "contribution"] = option(
        "contribution",
        "'accuracy' keeps rows of medium difficulty, with a share of correct answers from `--min` to `--max`; "
        "'contribution' keeps rows whose correct answers need their audio, image or video (`--ablate`).",
    )
    min: float | None = option(None, "With `--by accuracy`, minimum share of correct answers. Defaults to 0.1.")
    max: float | None = option(None, "With `--by accuracy`, maximum share of correct answers. Defaults to 0.9.")
    min_accuracy_with: float = option(
        0.5, "With `--by contribution`, minimum share of correct answers with the medium."
    )
    max_accuracy_without: float = option(
        0.25, "With `--by contribution`, maximum share of correct answers without the medium."
    )
    output_dir: str = option("outputs/filter", "Folder for the kept rows and the report; must be empty or missing.")

    def __post_init__(self):
        other_names = ("min", "max") if self.by == "contribution" else ("min_accuracy_with", "max_accuracy_without")
        for name in other_names:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ValueError(f"`--{name}` has no effect with `--by {self.by}`; leave it out, or change `--by`.")
        if self.by == "accuracy":
            self.min = 0.1 if self.min is None else self.min
            self.max = 0.9 if self.max is None else self.max
            if not 0 <= self.min <= self.max <= 1:
                raise ValueError(
                    f"`--min` ({self.min}) and `--max` ({self.max}) must be between 0 and 1, with `--min` at most "
                    "`--max`."
                )


def drop_reason_by_accuracy(record: dict[str, Any], smallest: float, largest: float) -> str | None:
    """
    Returns the reason to drop a row for its share of correct completions, or `None` to keep it. A kept row has a share
    from `smallest` to `largest`.
    """
    pass_rate = _share_correct(record["correct"])
    if pass_rate is None:
        return "not scored"
    if pass_rate < smallest:
        return "too hard"
    return "too easy" if pass_rate > largest else None


def drop_reason_by_contribution(
    record: dict[str, Any], modality: str, min_accuracy_with: float, max_accuracy_without: float
) -> str | None:
    """Returns the reason to drop a row, or `None` if correct completions need the row's medium."""
    if record["correct_without"] is None:
        return f"no {modality}"
    accuracy_with = _share_correct(record["correct"])
    accuracy_without = _share_correct(record["correct_without"])
    if accuracy_with is None or accuracy_without is None:
        return "not scored"
    if accuracy_without > max_accuracy_without:
        return f"correct without the {modality}"
    if accuracy_with < min_accuracy_with:
        return f"wrong with the {modality}"
    return None


def _share_correct(correct: Sequence[bool | None] | None) -> float | None:
    """Returns `None` if any completion isn't scored."""
    return None if correct is None or None in correct else sum(map(bool, correct)) / len(correct)


def _report(result: EvaluationResult, dropped: dict[int, str], args: FilterArguments) -> dict[str, Any]:
    records = {record["index"]: record for record in result.rows}
    n_rows = len(result.rows) + len(result.skipped)
    # Names of the options with thresholds, and by the name of a share in the report, its key in the records
    thresholds = ["min", "max"]
    keys_of_shares = {PASS_RATE: "correct"}
    if args.by == "contribution":
        thresholds = ["min_accuracy_with", "max_accuracy_without"]
        keys_of_shares = {"accuracy_with": "correct", "accuracy_without": "correct_without"}
    return {
        "by": args.by,
        "rows": n_rows,
        "kept": n_rows - len(dropped),
        "dropped": dict(Counter(dropped.values()).most_common()),
        **{name: getattr(args, name) for name in thresholds},
        "metrics": result.metrics,
        "settings": result.settings,
        "unreadable": result.skipped,
        "dropped_rows": [
            {
                "row": index,
                "reason": reason,
                **{name: _share_correct(records.get(index, {}).get(key)) for name, key in keys_of_shares.items()},
            }
            for index, reason in sorted(dropped.items())
        ],
    }


def _text(report: dict[str, Any]) -> str:
    settings = report["settings"]
    metrics = report["metrics"]
    modality = settings["ablate"]
    summary = f"{settings['dataset']}, split {settings['split']}: {report['kept']} of {report['rows']} rows "
    if report["by"] == "contribution":
        summary += f"need their {modality} ({settings['ablate_with']} in its place)."
    else:
        n = settings["num_samples"]
        summary += f"have {report['min']:.0%} to {report['max']:.0%} of {n} answers right."
    lines = [summary, *(f"- {count} dropped: {reason}" for reason, count in report["dropped"].items())]
    figures = [line for line in metric_lines(metrics, settings) if line.startswith(("accuracy", f"{modality}_"))]
    return "\n".join([*lines, *(f"- {line}" for line in figures)])


def _check_config(config: EvaluationConfig, by: str) -> EvaluationConfig:
    """For `--by accuracy`, one greedy completion per row becomes several samples."""
    if by == "contribution":
        check_ablated_modality(config.ablate)
        return config
    if config.ablate is not None:
        raise ValueError("`--by accuracy` answers rows with their media only; leave out `--ablate`.")
    if config.num_samples == 1 and config.temperature == 0:
        return replace(config, num_samples=_SAMPLES, temperature=_TEMPERATURE)
    if config.num_samples == 1:
        raise ValueError(
            "A row's pass rate needs several answers; set `--num_samples` to at least 2, such as the number of "
            "generations in training."
        )
    return config


ARGUMENTS = (RFTScriptArguments, FilterArguments, EvaluationConfig, ModelConfig)


def main(
    script_args: RFTScriptArguments, filter_args: FilterArguments, config: EvaluationConfig, model_args: ModelConfig
) -> None:
    """Samples completions with and without a medium, or several per row, and saves the kept rows with a report."""
    config = _check_config(config, filter_args.by)
    check_empty(filter_args.output_dir)
    accelerator = Accelerator()
    arguments = script_args, filter_args, config, model_args
    dataset, result = evaluate_by_name(*arguments, script_args.dataset_train_split, accelerator)
    reason_of: Any = drop_reason_by_contribution
    criteria: tuple = config.ablate, filter_args.min_accuracy_with, filter_args.max_accuracy_without
    if filter_args.by == "accuracy":
        reason_of = drop_reason_by_accuracy
        criteria = (filter_args.min, filter_args.max)
    reasons = {record["index"]: reason_of(record, *criteria) for record in result.rows}
    dropped = dict.fromkeys(result.skipped, "can't be read")
    dropped |= {index: reason for index, reason in reasons.items() if reason is not None}
    report = _report(result, dropped, filter_args)
    accelerator.print(printable(_text(report)))
    if not report["kept"]:
        raise ValueError("No row is left, so nothing is written; change the thresholds or the model.")
    if accelerator.is_main_process:
        kept = [index for index in range(len(dataset)) if index not in dropped]
        rows = dataset.select(kept)
        if filter_args.by == "accuracy":
            shares = {record["index"]: _share_correct(record["correct"]) for record in result.rows}
            rows = rows.remove_columns([PASS_RATE] if PASS_RATE in rows.column_names else [])
            rows = rows.add_column(PASS_RATE, [shares[index] for index in kept])
        write_folder(rows, filter_args.output_dir, MediaRules(media_dir=filter_args.media_dir))
        Path(filter_args.output_dir, REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    accelerator.end_training()
