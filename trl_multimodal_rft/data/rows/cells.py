# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Cells of a user's columns: missing values, truth values and numbers."""

import math
from decimal import Decimal
from numbers import Real
from typing import TypeVar, cast

import numpy as np
import torch


T = TypeVar("T")

_ARRAY_TYPES = (np.generic, np.ndarray, torch.Tensor)
Cell = bool | float | Decimal | str | bytes | list | dict | np.ndarray | np.generic | None


def cell_value(cell: T) -> T | None:
    """Returns a cell's value. A scalar array becomes a number. NaN and other missing values become `None`."""
    value = cast(T, cell.tolist()) if isinstance(cell, _ARRAY_TYPES) and cell.ndim == 0 else cell
    is_nan = isinstance(value, (Real, Decimal)) and value != value
    return None if is_nan or type(value).__name__ in ("NAType", "NaTType") else value


def finite_number(cell: Cell, column: str, row_index: int) -> float | None:
    """Returns the number in a cell, `None` for a missing value. Raises a `ValueError` if it isn't a finite number."""
    value = cell_value(cell)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)) or not math.isfinite(value):
        actual = f"{value!r:.40} of type {type(value).__name__}"
        raise ValueError(
            f"row {row_index}, column '{column}': is {actual}; give a finite number, or None if it is missing."
        )
    return float(value)


def truth_value(cell: Cell, column: str, row_index: int, *, is_required: bool = False) -> bool:
    """
    Returns whether a cell is true. Cells are booleans, 0 or 1. A missing value counts as false. Raises a `ValueError`
    for other cells, and for a missing value if `is_required`.
    """
    value = cell_value(cell)
    if value is None and is_required:
        raise ValueError(f"row {row_index}, column '{column}': is empty; fill it, or leave the row out.")
    if isinstance(value, (Real, Decimal, type(None))) and value in (None, 0, 1):
        return bool(value)
    actual, missing = f"{value!r:.40} of type {type(value).__name__}", ", or None if it is missing" * (not is_required)
    raise ValueError(f"row {row_index}, column '{column}': is {actual}; give True or False{missing}.")
