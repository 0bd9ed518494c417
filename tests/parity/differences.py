# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Options of TRL's configs, in its trainers beside this package's: what each value comes to.

`python tests/parity/differences.py grpo sft --options beta seed` prints a line for each run, `--output FILE` writes
them as lines of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parity.difference_runs import SUBJECTS, WITH_EXPERTS, Case, Result, differences, train
from parity.difference_values import (
    ABOUT_DATA,
    OF_TRANSFORMERS,
    SAMPLED,
    WITH,
    WITH_IMAGES,
    cases_of,
    is_config_only,
    names_of,
)


SAME = "same"
BOTH_REFUSE = "refused by both"
REFUSED = "refused here"
DIFFERS = "takes effect differently"
ACCEPTED = "accepted here alone"


@dataclass(frozen=True)
class Outcome:
    """What a value came to, where it differs, and whether TRL's results differ from those of its default."""

    trainer: str
    option: str
    value: Any
    rows: str
    outcome: str
    where: dict[str, Any]
    has_effect: bool
    errors: tuple[str | None, str | None]


def rows_of(trainer: str, option: str) -> list[str]:
    """Returns the kinds of rows that an option runs on."""
    if option in WITH_EXPERTS:
        return ["text"] if trainer == "reward" else ["experts"]
    has_images = option in ABOUT_DATA and option not in OF_TRANSFORMERS and trainer in WITH_IMAGES
    return ["text", "images"] if has_images else ["text"]


def case_of(trainer: str, option: str, value: Any, rows: str) -> Case:
    known = set(names_of(trainer))
    options = {name: other for name, other in WITH.get(option, {}).items() if name in known}
    is_sampled = option in SAMPLED and SUBJECTS[trainer].samples
    return Case(option, value, options, rows, is_sampled, is_config_only(option))


@functools.cache
def _default_run(trainer: str, option: str, rows: str) -> Result:
    """Runs TRL's trainer with the default of an option, and the other options of its runs."""
    case = case_of(trainer, option, None, rows)
    return train(trainer, case, ours=False, leaves_out=True)


def has_effect(trainer: str, case: Case, theirs: Result) -> bool:
    """Returns whether TRL's results differ from those of its default."""
    if case.config_only or theirs.error is not None:
        return False
    default = _default_run(trainer, case.option, case.rows)
    changes = differences(default, theirs)
    changes.pop("value", None)
    return bool(changes) or default.files != theirs.files or default.error is not None


def outcome_of(trainer: str, option: str, value: Any, rows: str) -> Outcome:
    """Runs both trainers with a value of an option, and sorts the outcome."""
    case = case_of(trainer, option, value, rows)
    theirs = train(trainer, case, ours=False)
    ours = train(trainer, case, ours=True)
    where: dict[str, Any] = {}
    if theirs.error is not None:
        outcome = ACCEPTED if ours.error is None else BOTH_REFUSE
    elif ours.error is not None:
        outcome = REFUSED
    else:
        where = differences(theirs, ours)
        outcome = DIFFERS if where else SAME
    effect = has_effect(trainer, case, theirs)
    return Outcome(trainer, option, value, rows, outcome, where, effect, (theirs.error, ours.error))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainers", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--options", nargs="*")
    parser.add_argument("--output")
    args = parser.parse_args(arguments)
    for trainer in args.trainers:
        for option in names_of(trainer):
            if args.options and option not in args.options:
                continue
            for rows in rows_of(trainer, option):
                for value in cases_of(trainer, option):
                    line = json.dumps(vars(outcome_of(trainer, option, value, rows)), default=str)
                    if args.output:
                        with open(args.output, "a", encoding="utf-8") as file:
                            file.write(line + "\n")
                    else:
                        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
