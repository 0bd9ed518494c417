# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of the batches of rows that the experience maker gets, of which no dataset is known."""

from collections.abc import Collection, Sequence

from ...data.rows.batches import Row
from ...data.rows.unread import check_columns
from ...data.rows.values import is_empty
from ...encoding.prompts import EncodedPrompt


class RowChecks:
    """
    Asks rows what the trainers ask of a dataset, once for each set of filled columns. Media that no prompt gets are an
    error as long as no prompt has had media, and otherwise a warning.
    """

    def __init__(self, ignored: Collection[str], model_modalities: Collection[str]):
        self.ignored = ignored  # media columns that no prompt gets
        self.model_modalities = model_modalities
        self.has_had_media = False
        self.checked_columns: set[frozenset[str]] = set()  # sets of filled columns

    def note(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Notes whether prompts of checked rows have media."""
        self.has_had_media = self.has_had_media or any(prompt.modalities for prompt in prompts)

    def check(self, rows: Sequence[Row]) -> list[str]:
        """Returns warnings about rows. Raises a `ValueError` for wrong columns, and for media that no prompt gets."""
        rows_by_columns: dict[frozenset[str], list[Row]] = {}
        for row in rows:
            filled = frozenset(name for name, value in row.items() if not is_empty(value))
            rows_by_columns.setdefault(filled, []).append(row)
        new = {filled: group for filled, group in rows_by_columns.items() if filled not in self.checked_columns}
        if not new:
            return []
        takes = self.model_modalities
        warning = None
        if not self.has_had_media:
            warning = check_columns(rows, "The rows", self.ignored, dataset_part="first", model_modalities=takes)
        of_groups = []
        if self.has_had_media or len(rows_by_columns) > 1:
            # The media of other rows say nothing about those of these
            for group in new.values():
                name = f"Row {group[0].row_index} of a batch"
                of_groups.append(check_columns(group, name, self.ignored, dataset_part="some", model_modalities=takes))
        self.checked_columns.update(new)
        return [*filter(None, of_groups)] or [*filter(None, [warning])]
