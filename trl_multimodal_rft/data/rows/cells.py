# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Cells of a user's columns: missing values, truth values and numbers."""

from decimal import Decimal
from math import inf, isfinite, nan
from numbers import Real
from typing import TypeVar, cast

import numpy as np
import torch


T = TypeVar("T")

_ARRAY_TYPES = (np.generic, np.ndarray, torch.Tensor)
# Words that are read as truth values
_TRUE = ("true", "yes", "good", "desirable", "1")
_FALSE = ("false", "no", "bad", "undesirable", "0")
_TRUTHS = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}
Cell = bool | float | Decimal | str | bytes | list | dict | np.ndarray | np.generic | None


def cell_value(cell: T) -> T | None:
    """Returns a cell's value. A scalar array becomes a number. NaN and other missing values become `None`."""
    value = cast(T, cell.tolist()) if isinstance(cell, _ARRAY_TYPES) and cell.ndim == 0 else cell
    is_nan = value.is_nan() if isinstance(value, Decimal) else isinstance(value, Real) and value != value
    return None if is_nan or type(value).__name__ in ("NAType", "NaTType") else value


def finite_number(cell: Cell, column: str, row_index: int) -> float | None:
    """Returns the number in a cell, `None` for a missing value. Raises a `ValueError` if it isn't a finite number."""
    value = cell_value(cell)
    if value is None:
        return None
    try:
        number = nan if isinstance(value, bool) or not isinstance(value, (Real, Decimal)) else float(value)
    except OverflowError:
        number = inf
    if not isfinite(number):
        actual = f"{value!r:.40} of type {type(value).__name__}"
        raise ValueError(
            f"row {row_index}, column '{column}': is {actual}; give a finite number, or None if it is missing."
        )
    return number


def truth_value(cell: Cell, column: str, row_index: int, *, is_required: bool = False) -> bool:
    """
    Returns whether a cell is true. Cells are booleans, 0 or 1, or the words true or false, yes or no, good or bad, and
    desirable or undesirable, in any case. A missing value counts as false. Raises a `ValueError` for other cells, and
    for a missing value if `is_required`.
    """
    value = cell_value(cell)
    if isinstance(value, str):
        value = _TRUTHS.get(value.strip().lower(), value)
    if value is None and is_required:
        raise ValueError(f"row {row_index}, column '{column}': is empty; fill it, or leave the row out.")
    if isinstance(value, (Real, Decimal, type(None))) and value in (None, 0, 1):
        return bool(value)
    actual = f"{value!r:.40} of type {type(value).__name__}"
    missing = ", or None if it is missing" * (not is_required)
    raise ValueError(f"row {row_index}, column '{column}': is {actual}; give True or False{missing}.")


def is_truth(cell: Cell) -> bool:
    """Returns whether [`truth_value`] reads a cell, other than a missing value."""
    try:
        truth_value(cell, "", 0, is_required=True)
    except ValueError:
        return False
    return True
