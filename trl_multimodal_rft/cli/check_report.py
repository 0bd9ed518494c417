# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What `trl-multimodal-rft check` found, in Markdown. Its memory doesn't grow with texts or media, but by numbers."""

import re
from array import array
from dataclasses import dataclass, field

import numpy as np

from ..families import MODALITIES
from ..reporting.model_card import in_code


# Rows and columns of a cause that are listed
_LISTED = 20


@dataclass
class CheckedRow:
    """What is known of a row."""

    index: int  # its place in the dataset
    media: dict[str, int] = field(default_factory=dict)  # how many media of each kind it has
    tokens: int | None = None  # tokens of its prompt; `None` if it has none
    media_tokens: dict[str, int] = field(default_factory=dict)  # how many of them stand for media, by kind
    is_cut: bool = False  # whether it has sounds beyond the model's window
    error: str | None = None  # why it would not train
    column: str | None = None  # where the error is


@dataclass
class Rows:
    """Rows that have something in common."""

    example: str = ""  # the error of the first one
    count: int = 0  # how many there are
    first: list[int] = field(default_factory=list)  # places of the first ones
    columns: dict[str, None] = field(default_factory=dict)  # columns, in the order in which they came

    def add(self, row: CheckedRow) -> None:
        """Counts a row."""
        self.count += 1
        if len(self.first) < _LISTED:
            self.first.append(row.index)
        if row.column is not None and len(self.columns) < _LISTED:
            self.columns[row.column] = None

    @property
    def listed(self) -> str:
        """Their places."""
        return ", ".join(map(str, self.first)) + (f" and {self.count - len(self.first)} more" * (self.count > _LISTED))


class Report:
    """What was found, row by row."""

    def __init__(self, dataset: str, split: str, model: str, limit: int | None, cuts: bool = False):
        self.dataset, self.split, self.model, self.limit, self.cuts = dataset, split, model, limit, cuts
        self.warnings: list[str] = []
        self.is_refused = False
        self.rows = 0
        self.causes: dict[tuple[str, str], Rows] = {}
        self.overlong, self.cut = Rows(), Rows()
        self.tokens = {name: array("q") for name in ("prompt", "text", *MODALITIES)}
        self.media = {kind: array("q") for kind in MODALITIES}

    @property
    def failed(self) -> int:
        """How many rows would not train."""
        if self.is_refused:
            return self.rows
        return sum(cause.count for cause in self.causes.values()) + self.overlong.count

    def add(self, row: CheckedRow) -> None:
        """Counts a row."""
        self.rows += 1
        for kind, number in row.media.items():
            self.media[kind].append(number)
        if row.is_cut:
            self.cut.add(row)
        if row.error is not None:
            # Errors of one cause differ in the names, numbers and objects that they quote
            key = re.sub(r"'[^']*'|\"[^\"]*\"|<[^>]*>|[\d.]*\d", "-", row.error)
            column = re.sub(r"\[\d+\]", "[]", row.column or "")
            self.causes.setdefault((column, key), Rows(row.error)).add(row)
        if row.tokens is None:
            return
        self.tokens["prompt"].append(row.tokens)
        self.tokens["text"].append(row.tokens - sum(row.media_tokens.values()))
        for kind, number in row.media_tokens.items():
            self.tokens[kind].append(number)
        if self.limit is not None and row.tokens > self.limit:
            self.overlong.add(row)

    def text(self) -> str:
        """Writes the report."""
        if not self.rows:
            raise ValueError(f"{self.dataset!r} has no rows.")
        verdict = f"All {self.rows} rows would train."
        if self.failed:
            verdict = f"{self._share(self.failed)} would not train."
        parts = [
            f"# Check of {in_code(self.dataset)} ({in_code(self.split)}) with {in_code(self.model)}",
            verdict,
            *(f"    {' '.join(warning.split())}" for warning in self.warnings),
            *self._causes(),
            *self._lengths(),
            *self._media(),
        ]
        return "\n\n".join(parts) + "\n"

    def _share(self, count: int) -> str:
        return f"{count} of {self.rows} rows ({100 * count / self.rows:.3g} %)"

    def _causes(self) -> list[str]:
        parts = ["## What would fail"] if self.causes else []
        for cause in sorted(self.causes.values(), key=lambda cause: -cause.count):
            columns = f" in {', '.join(map(in_code, cause.columns))}" if cause.columns else ""
            parts += [
                f"### {self._share(cause.count)}{columns}",
                f"    {' '.join(cause.example.split())}",
                f"Rows: {cause.listed}",
            ]
        return parts

    def _lengths(self) -> list[str]:
        if not self.tokens["prompt"]:
            return []
        total = sum(self.tokens["prompt"])
        lines = ["| tokens of | rows | min | median | p90 | p99 | max | share |", "|---" * 8 + "|"]
        for name, numbers in self.tokens.items():
            if numbers:
                points = np.percentile(numbers, (0, 50, 90, 99, 100), method="higher")
                cells = [name, len(numbers), *map(int, points), f"{100 * sum(numbers) / total:.3g} %"]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
        parts = ["## Lengths", "\n".join(lines)]
        if self.limit is not None:
            parts.append(
                f"Overlong, of more than {self.limit} tokens: {self._share(self.overlong.count)}"
                + f". Rows: {self.overlong.listed}" * bool(self.overlong.count)
            )
        return parts

    def _media(self) -> list[str]:
        lines = ["| kind | rows | min | median | max | all |", "|---" * 6 + "|"]
        for kind, numbers in self.media.items():
            if numbers:
                cells = [kind, len(numbers), min(numbers), int(np.median(numbers)), max(numbers), sum(numbers)]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
        if len(lines) == 2:
            return []
        parts = ["## Media of a row", "\n".join(lines)]
        if self.media["audio"]:
            parts.append(
                f"Audio beyond the model's window{', which is cut' * self.cuts}: {self._share(self.cut.count)}"
                + f". Rows: {self.cut.listed}" * bool(self.cut.count)
            )
        return parts
