# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The course of a training as one picture."""

import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..data.loading import require_module
from ..families import MODALITIES


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


logger = get_logger(__name__)

FILE_NAME = "training_curves.png"

_SHARE_OF_TIME = 0.02  # that pictures may take from the training
_SMOOTHED_FROM = 60  # points
_COLUMNS, _WIDTH, _ROW_HEIGHT, _DPI = 2, 8.0, 2.4, 150  # inches; 1200 pixels
_TRAINING, _HELD_OUT = "C0", "C1"


@dataclass
class _Curve:
    """Values by step; what lies between `low` and `high` is shaded."""

    label: str
    values: dict[int, float]
    low: dict[int, float] = field(default_factory=dict)
    high: dict[int, float] = field(default_factory=dict)
    colour: str = _TRAINING


@dataclass
class _Panel:
    title: str
    unit: str
    curves: list[_Curve]
    number: str = "{:.3g}"  # how the last value is written
    share: bool = False  # of 1
    largest: float = math.inf  # of values that are drawn, and the smallest
    smallest: float = -math.inf


def figure_of(log_history: list[dict[str, Any]], title: str | None = None) -> "Figure":
    """
    Draws what a trainer has logged, one panel for each of these that it has:

    - the reward, ± the standard deviation over completions, and `eval_reward`;
    - held-out accuracy, also without a kind of media, pass@k and majority@k with their confidence intervals, see
      [`GenerationEvalCallback`];
    - each reward function, if there are several;
    - the entropy of tokens;
    - the length of completions, from the shortest to the longest;
    - how much the media contribute to the completions, all and each kind;
    - the KL divergence from the reference;
    - what the critic explains of the returns, and its loss.

    Of more than 60 logs a curve is drawn thin, and thick its exponential moving average over a fortieth of them. The
    number at a panel's corner, or at a curve's name, is the last value.
    """
    figure_module, ticker = require_module("matplotlib.figure", "plots"), require_module("matplotlib.ticker", "plots")
    panels = _panels(log_history)
    if not panels:
        raise ValueError("The log has no reward, nor anything else that is drawn; train for at least `logging_steps`.")
    names = [panel.title for panel in panels]
    if len(names) % _COLUMNS:
        names = names[:1] * (_COLUMNS if len(names) > 1 else 1) + names[1:]  # the first is as wide as the picture
    n_columns = min(len(names), _COLUMNS)
    rows = [names[start : start + n_columns] for start in range(0, len(names), n_columns)]
    figure = figure_module.Figure(figsize=(_WIDTH, _ROW_HEIGHT * len(rows) + 0.4), dpi=_DPI, layout="constrained")
    places = figure.subplot_mosaic(rows)
    last_step = max(1, *(entry["step"] for entry in log_history))
    for panel in panels:
        axes = places[panel.title]
        _draw(axes, panel)
        axes.set_xlim(-0.02 * last_step, 1.02 * last_step)
        axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        if panel.share:
            axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
    if title is not None:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _draw(axes: "Axes", panel: _Panel) -> None:
    for curve in panel.curves:
        values = pd.Series(curve.values, dtype=float).sort_index()
        low, high = (pd.Series(edge, dtype=float).sort_index() for edge in (curve.low, curve.high))
        mark = "o" if len(values) <= _SMOOTHED_FROM else None
        last = panel.number.format(values.dropna().iloc[-1])
        style = {"color": curve.colour, "label": f"{curve.label} {last}", "marker": mark, "markersize": 2.5}
        if len(values) > _SMOOTHED_FROM:
            axes.plot(values.index, values, color=curve.colour, linewidth=0.6, alpha=0.4)
            values, low, high = (smoothed(series) for series in (values, low, high))
        axes.fill_between(low.index, low, high, color=curve.colour, alpha=0.18, linewidth=0)
        axes.plot(values.index, values, linewidth=1.6, **style)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("update", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    bottom, top = axes.get_ylim()
    if top > panel.smallest:
        axes.set_ylim(max(bottom, panel.smallest), min(top, panel.largest))
    if len(panel.curves) > 1:
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.8)
    else:
        axes.set_title(last, loc="right", fontsize=10, color=curve.colour)


def smoothed(values: "pd.Series") -> "pd.Series":
    r"""
    Exponential moving average over a fortieth of the values.

    A value of age $i$ has the weight $(1 - \frac{2}{s + 1})^i$ in a mean over all values so far, where $s$ is the
    fortieth.
    """
    return values.ewm(span=max(len(values) / 40, 1), ignore_na=True).mean()


def _panels(history: list[dict[str, Any]]) -> list[_Panel]:
    """The panels that something was logged for."""
    panels = [
        _Panel("Reward", "mean ± std of completions", list(_rewards(history))),
        _Panel(
            "Held-out accuracy",
            "rows, confidence interval",
            list(_accuracies(history)),
            number="{:.1%}",
            share=True,
            smallest=-0.03,
            largest=1.03,
        ),
        _Panel("Reward functions", "mean of completions", list(_reward_functions(history))),
        _Panel("Entropy", "nats per token", _plain(history, "entropy")),
        _Panel("Completion length", "tokens, shortest to longest", list(_lengths(history))),
        _Panel("Contribution of media", "nats per token", list(_contributions(history)), smallest=0.0),
        _Panel("KL divergence from the reference", "nats per token", _plain(history, "kl")),
        # Of a critic that knows nothing yet it may be far below 0
        _Panel("Explained variance", "share of variance", _plain(history, "explained_variance"), smallest=-1.03),
        _Panel("Value loss", "half the squared error", _plain(history, "value_loss", "critic_loss")),
    ]
    for panel in panels:
        panel.curves = [curve for curve in panel.curves if any(not math.isnan(v) for v in curve.values.values())]
    return [panel for panel in panels if panel.curves]


def _logged(history: list[dict[str, Any]], *names: str) -> dict[int, float]:
    """
    Values by step of the first of these metrics that was logged; of [`PPOTrainerVL`] they have other names. TRL logs
    `None` where there was nothing to average.
    """
    for name in names:
        values = {entry["step"]: entry[name] for entry in history if name in entry}
        if values:
            return {step: math.nan if value is None else float(value) for step, value in values.items()}
    return {}


def _plain(history: list[dict[str, Any]], *names: str) -> list[_Curve]:
    return [_Curve(names[0], _logged(history, *names))]


def _rewards(history: list[dict[str, Any]]) -> Iterator[_Curve]:
    means = _logged(history, "reward", "rollout/reward")
    spread = _logged(history, "reward_std", "rollout/reward_std")
    steps = means.keys() & spread.keys()
    low, high = ({step: means[step] + sign * spread[step] for step in steps} for sign in (-1, 1))
    yield _Curve("training", means, low, high)
    yield _Curve("held out", _logged(history, "eval_reward", "eval_reward_mean"), colour=_HELD_OUT)


def _reward_functions(history: list[dict[str, Any]]) -> Iterator[_Curve]:
    matches = [re.fullmatch(r"rewards/(.+)/mean", name) for name in _names(history)]
    names = [match[1] for match in matches if match]
    if len(names) > 1:
        for i, name in enumerate(names):
            yield _Curve(name, _logged(history, f"rewards/{name}/mean"), colour=f"C{i % 10}")


def _accuracies(history: list[dict[str, Any]]) -> Iterator[_Curve]:
    pattern = rf"eval_(accuracy(_without_({'|'.join(MODALITIES)}))?|(pass|majority)@\d+)"
    names = [name for name in _names(history) if re.fullmatch(pattern, name)]
    if {"eval_accuracy", "eval_pass@1"} <= {*names}:
        names.remove("eval_pass@1")  # the same number
    for i, name in enumerate(names):
        low, high = _logged(history, f"{name}_low"), _logged(history, f"{name}_high")
        steps = low.keys() & high.keys()
        edges = ({step: edge[step] for step in steps} for edge in (low, high))
        label = name.removeprefix("eval_").replace("_", " ")
        yield _Curve(label, _logged(history, name), *edges, colour=f"C{(i + 1) % 10}")


def _lengths(history: list[dict[str, Any]]) -> Iterator[_Curve]:
    names = ("mean", "min", "max")
    mean, low, high = (_logged(history, f"completions/{name}_length", f"response_length_{name}") for name in names)
    yield _Curve("length", mean, low, high)


def _contributions(history: list[dict[str, Any]]) -> Iterator[_Curve]:
    yield _Curve("all", _logged(history, "media/contribution"))
    for i, kind in enumerate(MODALITIES, start=1):
        yield _Curve(kind, _logged(history, f"media/contribution/{kind}"), colour=f"C{i}")


def _names(history: Iterable[dict[str, Any]]) -> list[str]:
    """What was logged, in the order of its first time."""
    return list(dict.fromkeys(name for entry in history for name in entry))


class TrainingCurvesCallback(TrainerCallback):
    """
    A [`~transformers.TrainerCallback`] that draws the training curves into `training_curves.png` in the output folder.

    The picture shows what [`~reporting.curves.figure_of`] does, of the whole run, also of one that was resumed. It is
    drawn again when something is logged, but not so often that it would take more than a fiftieth of the time, and at
    the end. Only the main process draws. The file is always a whole picture, and pyplot is not used, so nothing
    changes in a notebook.

    It needs matplotlib: `pip install "trl-multimodal-rft[plots]"`.

    Raises:
        `ImportError`: If matplotlib is missing.

    Example:
    ```python
    trainer = MultimodalGRPOTrainer(..., callbacks=[TrainingCurvesCallback()])
    ```
    """

    def __init__(self):
        require_module("matplotlib", "plots")
        self._next_time = -math.inf
        self._has_ended = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._next_time = -math.inf
        self._has_ended = False

    def on_log(self, args, state, control, **kwargs):
        # Other callbacks may evaluate and log when training has ended
        if self._has_ended or time.perf_counter() >= self._next_time:
            self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._has_ended = True
        self._write(args, state)

    def _write(self, args, state) -> None:
        if not state.is_world_process_zero or not _panels(state.log_history):
            return
        start = time.perf_counter()
        folder = Path(args.output_dir)
        name = folder.absolute().name
        figure = figure_of(state.log_history, f"{name}: update {state.global_step} of {state.max_steps}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _save(figure, folder / FILE_NAME)
        except OSError as error:  # a full disk is no reason to stop training
            logger.warning(f"The training curves were not drawn: {error}")
        end = time.perf_counter()
        self._next_time = end + (end - start) / _SHARE_OF_TIME


def _save(figure: "Figure", path: Path) -> None:
    """Whoever reads the file gets the old picture or the new one."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(unfinished, format="png")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
