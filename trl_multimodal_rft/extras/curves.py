# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training curves as one picture."""

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState, TrainingArguments

from ..data.reading.decoding import require_module
from ..modalities import MODALITIES
from ..reporting.events import ErrorCallback, EventPart
from ..reporting.model_card import CURVES


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


logger = get_logger(__name__)

_SHARE_OF_TIME = 0.02  # maximum share of the training time for drawing
_LONGEST_UNSMOOTHED = 60  # points of the longest curve that isn't smoothed
_COLUMNS = 2  # panels per row
_WIDTH = 8.0  # inches
_ROW_HEIGHT = 2.4  # inches
_DPI = 150  # pixels per inch
_SHARE_LIMITS = (-0.03, 1.03)  # limits of an axis of shares
_COLOURS = {"training": 0, "held out": 1}  # indices of matplotlib's colours, for labels that several panels have
_HELD_OUT = rf"eval_(accuracy(?:_without_(?:{'|'.join(MODALITIES)}))?|(?:pass|majority)@\d+)"


class _Panel(NamedTuple):
    """A panel of the picture, with a curve per metric."""

    title: str
    unit: str  # of the vertical axis
    # Regular expressions of the metrics' names, by a curve's label. For "", the label is the text of the first group.
    metrics: dict[str, str]
    limits: tuple[float, float] = (-math.inf, math.inf)  # of the axis


_PANELS = (  # some names of metrics are [`PPOTrainerVL`]'s
    _Panel(
        "Reward",
        "mean ± std of completions",
        {"training": r"(?:rollout/)?reward", "held out": r"eval_reward(?:_mean)?", "": r"eval_(\w+)_reward"},
    ),
    _Panel("Held-out accuracy", "rows, confidence interval", {"": _HELD_OUT}, _SHARE_LIMITS),
    _Panel(
        "Accuracy of pairs",
        "pairs, chosen ahead",
        {"training": "rewards/accuracies|accuracy", "held out": "eval_rewards/accuracies"},
        _SHARE_LIMITS,
    ),
    _Panel(
        "Margin of pairs",
        "chosen minus rejected",
        {"training": "rewards/margins|margin", "held out": "eval_(?:rewards/margins|margin)"},
    ),
    _Panel("Reward functions", "mean of completions", {"": "rewards/(.+)/mean"}),
    _Panel("Entropy", "nats per token", {"entropy": "entropy"}),
    _Panel(
        "Completion length", "tokens, shortest to longest", {"length": "completions/mean_length|response_length_mean"}
    ),
    _Panel(
        "Contribution of media",
        "nats per token",
        {"all": "media/contribution", **{modality: f"media/contribution/{modality}" for modality in MODALITIES}},
        (0.0, math.inf),
    ),
    _Panel("KL divergence from the reference", "nats per token", {"kl": "kl"}),
    # An untrained critic may be far below 0
    _Panel("Explained variance", "share of variance", {"explained": "explained_variance"}, (-1.03, math.inf)),
    _Panel("Value loss", "half the squared error", {"loss": "value_loss|critic_loss"}),
)


def figure_of(log_history: list[dict[str, Any]], title: str | None = None) -> "Figure":
    """
    Draws the metrics of a trainer's log, a panel for each that it has: rewards, held-out results, pairs, entropy,
    lengths, contribution of media, divergence and critic. Over 60 logs, a thick line shows the exponential average
    over a fortieth of them. Raises a `ValueError` if there is nothing to draw.
    """
    figure_module = require_module("matplotlib.figure", "plots")
    ticker = require_module("matplotlib.ticker", "plots")
    metrics = _metrics_of(log_history)
    curves_of_panels = [(panel, _curve_names(panel, metrics)) for panel in _PANELS]
    panels = {panel.title: (panel, curves) for panel, curves in curves_of_panels if curves}
    if not panels:
        raise ValueError("The log has no reward or other metric to draw; train for at least `logging_steps`.")
    names = [*panels]
    if len(names) % _COLUMNS:
        names = names[:1] * (_COLUMNS if len(names) > 1 else 1) + names[1:]  # the first is as wide as the picture
    n_columns = min(len(names), _COLUMNS)
    rows = [names[start : start + n_columns] for start in range(0, len(names), n_columns)]
    figure = figure_module.Figure(figsize=(_WIDTH, _ROW_HEIGHT * len(rows) + 0.4), dpi=_DPI, layout="constrained")
    last_step = max(1, *(entry["step"] for entry in log_history))
    for name, axes in figure.subplot_mosaic(rows).items():
        panel, curves = panels[name]
        is_share = panel.limits == _SHARE_LIMITS
        # The first curve of held-out accuracy has the colour of "held out" in other panels
        _draw(axes, curves, metrics, "{:.1%}" if is_share else "{:.3g}", first_colour=int(name == "Held-out accuracy"))
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.set_ylabel(panel.unit, fontsize=9)
        bottom, top = axes.get_ylim()
        if top > panel.limits[0]:  # else the limits would hide the whole curve
            axes.set_ylim(max(bottom, panel.limits[0]), min(top, panel.limits[1]))
        axes.set_xlim(-0.02 * last_step, 1.02 * last_step)
        axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        if is_share:
            axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
    if title is not None:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _metrics_of(history: list[dict[str, Any]]) -> dict[str, "pd.Series"]:
    """`None`, which TRL logs as the mean of no values, becomes `NaN`."""
    values: dict[str, dict[int, float]] = {}
    for entry in history:
        for name, value in entry.items():
            if value is None or isinstance(value, (int, float)):
                values.setdefault(name, {})[entry["step"]] = math.nan if value is None else float(value)
    return {name: pd.Series(metric_values, dtype=float).sort_index() for name, metric_values in values.items()}


def _curve_names(panel: _Panel, metrics: dict[str, "pd.Series"]) -> dict[str, str]:
    """A label's first metric counts."""
    names = {}
    for label, pattern in panel.metrics.items():
        for name, values in metrics.items():
            match = re.fullmatch(pattern, name)
            if match and values.notna().any():
                names.setdefault(label or (match[1].replace("_", " ") if name.startswith("eval_") else match[1]), name)
    if {"accuracy", "pass@1"} <= names.keys():
        del names["pass@1"]  # the same number as the accuracy
    return {} if panel.title == "Reward functions" and len(names) == 1 else names


def _band(name: str, metrics: dict[str, "pd.Series"]) -> "tuple[pd.Series, pd.Series] | None":
    """A band is mean ± std, a confidence interval, or minimum and maximum."""
    if name.endswith("reward") and f"{name}_std" in metrics and not name.startswith("eval_"):
        return metrics[name] - metrics[f"{name}_std"], metrics[name] + metrics[f"{name}_std"]
    low = f"{name}_low"
    high = f"{name}_high"
    if "length" in name:
        low = name.replace("mean", "min")
        high = name.replace("mean", "max")
    if low not in metrics or high not in metrics:
        return None
    steps = metrics[low].index.intersection(metrics[high].index)
    return metrics[low][steps], metrics[high][steps]


def _draw(
    axes: "Axes", curves: dict[str, str], metrics: dict[str, "pd.Series"], number_format: str, first_colour: int
) -> None:
    for i, (label, name) in enumerate(curves.items(), start=first_colour):
        values = metrics[name]
        band = _band(name, metrics)
        colour = f"C{_COLOURS.get(label, i) % 10}"
        last = number_format.format(values.dropna().iloc[-1])
        is_long = len(values) > _LONGEST_UNSMOOTHED
        if is_long:
            axes.plot(values.index, values, color=colour, linewidth=0.6, alpha=0.4)
            values = smoothed(values)
            band = band and tuple(map(smoothed, band))
        if band:
            axes.fill_between(band[0].index, *band, color=colour, alpha=0.18, linewidth=0)
        style = {"color": colour, "label": f"{label} {last}", "marker": None if is_long else "o", "markersize": 2.5}
        axes.plot(values.index, values, linewidth=1.6, **style)
    axes.set_xlabel("update", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        # Below the axes, where no curve is; two labels beside each other fit under a panel if they are short
        is_short = max(map(len, curves)) <= 10
        columns = 2 if is_short else 1
        style = {"fontsize": 8, "frameon": False, "columnspacing": 1.0, "labelspacing": 0.2}
        axes.legend(loc="upper left", bbox_to_anchor=(-0.08, -0.22), ncols=columns, **style)
    else:
        axes.set_title(last, loc="right", fontsize=10, color=colour)


def smoothed(values: "pd.Series") -> "pd.Series":
    """Returns the exponential moving average with a span of a fortieth of the values."""
    return values.ewm(span=max(len(values) / 40, 1), ignore_na=True).mean()


class TrainingCurvesCallback(ErrorCallback):
    """
    A [`~transformers.TrainerCallback`] that draws the training curves into `training_curves.png` in the output folder.

    [`figure_of`] draws the picture of the whole run, also after resuming. The main process draws
    after logs, for at most a fiftieth of the time, and at the end of training. The callback replaces the file
    atomically. It doesn't use pyplot, so notebooks are unaffected.

    The callback needs matplotlib: `pip install "trl-multimodal-rft[plots]"`.

    Raises:
        `ImportError`: If matplotlib is missing.

    Example:
    ```python
    trainer = MultimodalGRPOTrainer(..., callbacks=[TrainingCurvesCallback()])
    ```
    """

    def __init__(self):
        require_module("matplotlib", "plots")
        self._next_draw_time = -math.inf
        self._has_ended = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: EventPart):
        self._next_draw_time = -math.inf
        self._has_ended = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        # Other callbacks may evaluate and log after the end of training
        if self._has_ended or time.perf_counter() >= self._next_draw_time:
            self._write(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        self._has_ended = True
        self._write(args, state)

    on_error = on_train_end

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Draws a picture on the main process if the log has a metric to draw, and sets the time of the next one."""
        metrics = _metrics_of(state.log_history)
        if not state.is_world_process_zero or not any(_curve_names(panel, metrics) for panel in _PANELS):
            return
        start = time.perf_counter()
        folder = Path(str(args.output_dir))
        # A run can resume from a checkpoint with more steps than `max_steps`, and then takes no further step
        steps = max(state.global_step, state.max_steps)
        title = f"{folder.absolute().name}: update {state.global_step} of {steps}"
        figure = figure_of(state.log_history, title)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, folder / CURVES)
        except OSError as error:  # a full disk is no reason to stop training
            logger.warning(f"The training curves were not drawn: {error}")
        end = time.perf_counter()
        self._next_draw_time = end + (end - start) / _SHARE_OF_TIME


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a picture and replaces the file atomically: readers get the old picture or the new one."""
    partial = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
