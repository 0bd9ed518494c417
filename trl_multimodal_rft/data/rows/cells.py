# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Cells of a user's columns: missing values, truth values and numbers."""

import math
from decimal import Decimal
from numbers import Real
from typing import Any


def plain_scalar(cell: Any) -> Any:
    """A cell whose array or tensor without a dimension is a number of Python."""
    return cell.item() if hasattr(cell, "item") and getattr(cell, "ndim", None) == 0 else cell


def is_missing(cell: Any) -> bool:
    """Whether a cell is `None`, or NaN, which tables of numbers hold in its place."""
    cell = plain_scalar(cell)
    nothing = cell is None or type(cell).__name__ in ("NAType", "NaTType")  # those of pandas
    return nothing or (isinstance(cell, (Real, Decimal)) and cell != cell)


def finite_number(cell: Any, column: str, row: int) -> float | None:
    """The finite number in a cell, `None` in a missing one. Raises a `ValueError` for all else."""
    cell = plain_scalar(cell)
    if is_missing(cell):
        return None
    if isinstance(cell, bool) or not isinstance(cell, (Real, Decimal)) or not math.isfinite(cell):
        raise _wrong(cell, column, row, "a finite number")
    return float(cell)


def truth_value(cell: Any, column: str, row: int) -> bool:
    """Whether a cell is true, or 1; false, 0 and missing ones aren't. Raises a `ValueError` for all else."""
    cell = plain_scalar(cell)
    if not is_missing(cell) and not (isinstance(cell, (Real, Decimal)) and cell in (0, 1)):
        raise _wrong(cell, column, row, "True or False")
    return not is_missing(cell) and bool(cell)


def _wrong(cell: Any, column: str, row: int, wanted: str) -> ValueError:
    found = f"{cell!r:.40} of type {type(cell).__name__}"
    return ValueError(f"row {row}, column '{column}': is {found}; give {wanted}, or None where it is missing.")
