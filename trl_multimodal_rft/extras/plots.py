# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Pictures for the option `--plot` of commands: distributions, and accuracies with confidence intervals."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.reading.decoding import require_module


if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = 3  # panels per row
_WIDTH = 9.0  # inches
_ROW_HEIGHT = 2.2  # inches
_DPI = 150  # pixels per inch
_BINS = 40
_BAR_HEIGHT = 0.28  # inches


def check_plot(path: str | None) -> None:
    """
    Checks whether the picture of `--plot` can be written, before a command does its work.

    Raises:
        `ImportError`: If matplotlib is missing.
        `ValueError`: If the file isn't a PNG, or its folder is missing.
    """
    if path is None:
        return
    require_module("matplotlib.figure", "plots")
    if Path(path).suffix != ".png":
        raise ValueError(f"`--plot {path}`: pictures are PNG files; name one that ends in `.png`.")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"`--plot {path}`: its folder is missing; make it, or name another one.")


def histograms(values: Mapping[str, Sequence[float]], y_label: str, bins: Sequence[float] | int = _BINS) -> "Figure":
    """
    Draws distributions, a panel for each name, with the median as a line.

    Args:
        values (`Mapping[str, Sequence[float]]`):
            Values by name. The name is the panel's title. Its part before " of " is the unit of the horizontal axis.
            Names without values have no panel.
        y_label (`str`):
            Label of the vertical axis: the things that it counts, such as `"rows"`.
        bins (`Sequence[float]` or `int`, *optional*, defaults to `40`):
            Edges of the bars, or their number. With a number, integers in a smaller range get one bar each.
    """
    samples = {name: np.asarray(sample, dtype=float) for name, sample in values.items() if len(sample)}
    n_columns = min(_COLUMNS, len(samples)) or 1
    n_rows = -(-len(samples) // n_columns) or 1
    figure = _figure(_WIDTH * n_columns / _COLUMNS, _ROW_HEIGHT * n_rows)
    for i, (name, sample) in enumerate(samples.items()):
        axes = figure.add_subplot(n_rows, n_columns, i + 1)
        low = sample.min()
        high = sample.max()
        median = float(np.median(sample))
        is_narrow = isinstance(bins, int) and high - low < bins and bool(np.all(sample % 1 == 0))
        axes.hist(sample, bins=np.arange(low - 0.5, high + 1) if is_narrow else bins, color="C0")
        axes.axvline(median, color="C1", linewidth=1.2)
        axes.locator_params("both" if is_narrow else "y", integer=True, min_n_ticks=1)
        axes.set_title(name, loc="left", fontsize=9, fontweight="bold")
        median_text = f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"
        axes.set_title(f"median {median_text}", loc="right", fontsize=8, color="C1")
        axes.set_xlabel(name.partition(" of ")[0], fontsize=8)
        axes.set_ylabel(y_label if i % n_columns == 0 else "", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def accuracies(metrics: Mapping[str, float | None]) -> "Figure":
    """
    Draws `accuracy` of all rows and of each value of `group_by`, with their confidence intervals.

    Args:
        metrics (`Mapping[str, float | None]`):
            Metrics of an [`~evaluation.EvaluationResult`].
    """
    values = {name: value for name, value in metrics.items() if value is not None}
    # A name such as `accuracy/a_low` is the end of an interval, and has no interval itself. Bars begin at the bottom,
    # so the reversed order shows the first name at the top.
    names = [name for name in values if re.match("accuracy(/|$)", name) and f"{name}_low" in metrics][::-1]
    figure = _figure(6.0, 0.9 + _BAR_HEIGHT * len(names))
    axes = figure.add_subplot()
    ink = require_module("matplotlib", "plots").rcParams["text.color"]  # light on a dark background
    for i, name in enumerate(names):
        axes.barh(i, values[name], color="C1" if name == "accuracy" else "C0", height=0.7, alpha=0.6)
        if f"{name}_low" in values:  # enough rows for an interval
            ends = [values[f"{name}_low"], values[f"{name}_high"]]
            axes.plot(ends, [i, i], color=ink, linewidth=1.2, marker="|", markersize=6)
        axes.text(1.03, i, f"{values[name]:.1%}", fontsize=8, va="center")
    axes.set_xlabel("rows with a right answer", fontsize=8)
    labels = ["all rows" if name == "accuracy" else name.removeprefix("accuracy/") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(require_module("matplotlib.ticker", "plots").PercentFormatter(1))
    axes.set_title("Accuracy and its confidence interval", loc="left", fontsize=9, fontweight="bold")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(width: float, height: float) -> "Figure":
    return require_module("matplotlib.figure", "plots").Figure((width, height), _DPI, layout="constrained")
