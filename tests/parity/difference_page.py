# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The table of `difference_table.py` as tables of `docs/compare.md`, which `make fix` writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parity.difference_table import DIFFERENCES, DIFFERS, REFUSED, Difference


HEAD = "| option | value | here | why | how much | as TRL |\n|---|---|---|---|---|---|"
NAMES = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "ppo": "PPO",
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "reward models",
    "distillation": "distillation",
}
SECTIONS = [
    ("Other results", lambda entry: entry.outcome == DIFFERS),
    ("Values that TRL takes, and that are errors here", lambda entry: entry.outcome == REFUSED),
    (
        "Values that TRL refuses, and that train here",
        lambda entry: entry.outcome not in (DIFFERS, REFUSED),
    ),
]


def _code(values: Iterable[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _row(entry: Difference) -> str:
    options = "any" if "*" in entry.options else _code(entry.options)
    if "*" not in entry.trainers:
        options += f" of {', '.join(NAMES[name] for name in entry.trainers)}"
    values = "any other" if entry.values is None else _code(map(repr, entry.values))
    if entry.rows is not None:
        values += f" with {entry.rows}"
    cells = [options, values, entry.what, entry.why, entry.size, entry.as_trl]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def tables() -> str:
    """Returns a table for each kind of difference that occurs."""
    sections = []
    for title, is_in in SECTIONS:
        rows = [_row(entry) for entry in DIFFERENCES if is_in(entry)]
        if rows:
            sections.append("\n".join([f"#### {title}\n", HEAD, *rows]))
    return "\n\n".join(sections)
