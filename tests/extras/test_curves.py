# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The picture of the training curves: its contents, and that one process writes a complete file."""

import logging
import math
import re
import resource
import runpy
import sys
from collections import Counter
from types import SimpleNamespace

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
import pytest
from helpers.folders import ROOT
from helpers.trainer_utils import audio_rows, make_trainer
from matplotlib import _pylab_helpers
from matplotlib.collections import FillBetweenPolyCollection
from PIL import Image
from transformers import TrainerCallback, TrainerState

from trl_multimodal_rft import (
    GenerationEvalCallback,
    MultimodalGRPOTrainer,
    TrainingCurvesCallback,
)
from trl_multimodal_rft.evaluation import EvaluationConfig
from trl_multimodal_rft.extras import curves
from trl_multimodal_rft.extras.curves import figure_of, smoothed


def brief(completion_ids, **kwargs):
    return [float(len(ids) < 8) for ids in completion_ids]


def varied(completion_ids, **kwargs):
    return [0.1 * (sum(ids) % 7) for ids in completion_ids]


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def band(axes):
    """Returns lower and upper edge by step."""
    (shaded,) = (c for c in axes.collections if isinstance(c, FillBetweenPolyCollection) and len(c.get_paths()))
    edges = {}
    for x, y in shaded.get_paths()[0].vertices:
        edges.setdefault(x, set()).add(y)
    return {x: (min(ys), max(ys)) for x, ys in edges.items()}


def logged(history, name):
    return [(entry["step"], entry[name]) for entry in history if name in entry]


def drawing(folder, trainer_class=MultimodalGRPOTrainer, **options):
    """Returns a trainer that draws its curves."""
    options = {"reward": varied, "objects": {"callbacks": [TrainingCurvesCallback()]}, **options}
    return make_trainer(trainer_class, "qwen2_audio", audio_rows(), folder, **options)


@pytest.fixture
def drawn(monkeypatch):
    """Returns what the callback draws."""
    pictures = []

    def recording(log_history, title=None):
        pictures.append(([dict(entry) for entry in log_history], title))
        return figure_of(log_history, title)

    monkeypatch.setattr(curves, "figure_of", recording)
    return pictures


# Pictures


def test_what_is_drawn():
    history = [
        {"step": 0, "eval_accuracy": 0.1},
        {"step": 2, "reward": 0.5, "reward_std": 0.25, "entropy": 2.0, "rewards/one/mean": 0.5},
        {"step": 4, "reward": 0.75, "reward_std": 0.125, "entropy": 1.5, "rewards/one/mean": 0.75},
        {"step": 4, "eval_accuracy": 0.5, "eval_accuracy_low": 0.25, "eval_accuracy_high": 0.75, "eval_pass@1": 0.5},
        {"step": 4, "train_runtime": 1.0},
    ]
    figure = figure_of(history, "A title")
    assert figure.get_suptitle() == "A title"
    axes = panels(figure)
    assert [*axes] == ["Reward", "Held-out accuracy", "Entropy"]  # a single reward function is the reward
    assert [*map(points, axes["Reward"].lines)] == [[(2, 0.5), (4, 0.75)]]
    assert band(axes["Reward"]) == {2: (0.25, 0.75), 4: (0.625, 0.875)}
    assert [*map(points, axes["Held-out accuracy"].lines)] == [[(0, 0.1), (4, 0.5)]]
    assert band(axes["Held-out accuracy"]) == {4: (0.25, 0.75)}
    assert axes["Held-out accuracy"].get_title(loc="right") == "50.0%"
    assert all(each.get_xlabel() == "update" and each.get_ylabel() for each in figure.axes)
    # Of three panels, the first fills a row
    assert axes["Reward"].get_subplotspec().colspan == range(2)
    assert figure.get_size_inches()[0] * figure.dpi == 1200


def test_panels_follow_the_metrics():
    training = {"reward": "Reward", "entropy": "Entropy", "kl": "KL divergence from the reference"}
    training |= {"completions/mean_length": "Completion length", "media/contribution": "Contribution of media"}
    training |= {"explained_variance": "Explained variance", "value_loss": "Value loss"}
    training |= {"rewards/accuracies": "Accuracy of pairs", "rewards/margins": "Margin of pairs"}
    entry = {"step": 1, **dict.fromkeys(training, 0.5)}
    assert {*panels(figure_of([entry]))} == {*training.values()}
    for name, title in training.items():
        assert title not in panels(figure_of([{key: value for key, value in entry.items() if key != name}]))
        assert [*panels(figure_of([{"step": 1, name: 0.5}]))] == [title]
    for empty, message in (({"train_runtime": 3.0}, "least `logging_steps`"), ({"kl": None}, "no reward")):
        with pytest.raises(ValueError, match=message):
            figure_of([{"step": 1, **empty}])


@pytest.mark.parametrize("names", [("rewards/accuracies", "rewards/margins"), ("accuracy", "margin")])
def test_curves_of_pairs(names):
    """DPO's metrics and those of a reward model, whose held-out accuracy has the panel of other accuracies."""
    history = [{"step": step, **dict.fromkeys(names, 0.25 * step)} for step in (1, 2)]
    history += [{"step": 2, **{f"eval_{name}": 0.75 for name in names}}]
    axes = panels(figure_of(history))
    labels = {title: [line.get_label() for line in each.lines] for title, each in axes.items()}
    held_out = labels.pop("Held-out accuracy", [])
    assert held_out == ["accuracy 75.0%"] * (names[0] == "accuracy")
    assert labels == {
        "Accuracy of pairs": ["training 50.0%", *["held out 75.0%"] * (not held_out)],
        "Margin of pairs": ["training 0.5", "held out 0.75"],
    }
    assert points(axes["Margin of pairs"].lines[0]) == [(1, 0.25), (2, 0.5)]
    colours = {title: [line.get_color() for line in each.lines] for title, each in axes.items()}
    assert colours.pop("Held-out accuracy", ["C1"]) == ["C1"] and colours["Margin of pairs"] == ["C0", "C1"]
    assert colours["Accuracy of pairs"] == ["C0", "C1"][: len(labels["Accuracy of pairs"])]


def test_several_curves_in_a_panel():
    history = [
        {"step": step, "reward": 1.0 * step, "rewards/a/mean": 0.5 * step, "rewards/b/mean": 0.25 * step}
        for step in (1, 2)
    ]
    history += [{"step": 2, "eval_reward": 3.0, "eval_accuracy": 0.5, "eval_pass@1": 0.5}]
    history += [{"step": 2, "eval_pass@8": 0.75, "eval_majority@8": 0.625, "eval_rewards/a/mean": 9.0}]
    history += [{"step": 2, "eval_accuracy_without_audio": 0.25, "eval_accuracy_with_audio": 0.9}]
    history += [{"step": 2, "media/contribution": 0.3, "media/contribution/image": 0.1}]
    axes = panels(figure_of(history))
    labels = {title: [line.get_label() for line in each.lines] for title, each in axes.items()}
    assert labels == {
        "Reward": ["training 2", "held out 3"],
        "Held-out accuracy": ["accuracy 50.0%", "pass@8 75.0%", "majority@8 62.5%", "accuracy without audio 25.0%"],
        "Reward functions": ["a 1", "b 0.5"],
        "Contribution of media": ["all 0.3", "image 0.1"],
    }
    for each in axes.values():
        assert [text.get_text() for text in each.get_legend().get_texts()] == [line.get_label() for line in each.lines]
        assert len({line.get_color() for line in each.lines}) == len(each.lines)
        assert each.get_title(loc="right") == ""


def test_gaps():
    """A metric without a value leaves a gap, and the corner shows the last number."""
    values = [None, -40.0, 0.5, None]
    history = [{"step": step, "explained_variance": value} for step, value in enumerate(values)]
    (axes,) = figure_of(history).axes
    np.testing.assert_equal([line.get_ydata() for line in axes.lines], [[math.nan, -40, 0.5, math.nan]])
    assert axes.get_title(loc="right") == "0.5"
    assert axes.get_ylim()[0] > -2  # an untrained critic doesn't compress the rest
    (axes,) = figure_of(history[:2]).axes
    bottom, top = axes.get_ylim()
    assert bottom < -40 < top


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("step", "value"), [(0, 0.0), (1, 1e30), (100_000, -1e30), (1, math.inf), (1, math.nan)])
def test_any_value_can_be_drawn(step, value, tmp_path):
    names = ("reward", "reward_std", "eval_accuracy", "eval_accuracy_low", "eval_accuracy_high", "explained_variance")
    history = [{"step": step, "entropy": 0.5}, {"step": step, **dict.fromkeys(names, value)}]
    figure_of(history).savefig(tmp_path / "curves.png")


def test_smoothing():
    generator = np.random.default_rng(0)
    values = generator.normal(size=200)
    values[50] = math.nan
    mean = 0.0
    weight = 0.0
    expected = []
    kept = 1 - 2 / (200 / 40 + 1)
    for value in values:
        if not math.isnan(value):
            mean = kept * mean + value
            weight = kept * weight + 1
        expected.append(mean / weight)
    np.testing.assert_allclose(smoothed(pd.Series(values)), expected, rtol=1e-12)

    def history(n):
        return [{"step": i, "reward": values[i % 50], "reward_std": 0.25} for i in range(n)]

    assert [len(axes.lines) for axes in figure_of(history(60)).axes] == [1]
    (axes,) = figure_of(history(200)).axes
    thin, thick = axes.lines
    assert thin.get_linewidth() < thick.get_linewidth()
    raw = [entry["reward"] for entry in history(200)]
    np.testing.assert_equal(thin.get_ydata(), raw)
    np.testing.assert_equal(thick.get_ydata(), smoothed(pd.Series(raw)))
    edges = band(axes)
    for x, y in points(thick):
        assert edges[x] == pytest.approx((y - 0.25, y + 0.25))


# Runs


def test_grpo(tmp_path, drawn):
    """The picture includes the log of another callback at the end of training."""
    before = dict(matplotlib.rcParams)
    trainer = drawing(tmp_path / "run", reward=[brief, varied], beta=0.1, max_steps=3)
    config = EvaluationConfig(max_completion_length=8)
    trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(4), brief, config, freq=2))
    trainer.train()
    picture = Image.open(tmp_path / "run" / "training_curves.png")
    picture.load()
    assert picture.format == "PNG" and picture.width == 1200 and picture.height > 600
    assert len(picture.convert("L").getcolors()) > 50
    assert [*tmp_path.joinpath("run").iterdir()] == [tmp_path / "run" / "training_curves.png"]
    # pyplot doesn't know the figure
    assert not _pylab_helpers.Gcf.figs and dict(matplotlib.rcParams) == before

    history, title = drawn[-1]
    assert history == trainer.state.log_history and title == "run: update 3 of 3"
    axes = panels(figure_of(history))
    assert [*axes] == [
        *("Reward", "Held-out accuracy", "Reward functions", "Entropy", "Completion length"),
        "KL divergence from the reference",
    ]
    assert points(axes["Reward"].lines[0]) == logged(history, "reward")
    assert [step for step, _ in points(axes["Held-out accuracy"].lines[0])] == [0, 2, 3]
    low, high = (dict(logged(history, f"completions/{name}_length")) for name in ("min", "max"))
    assert band(axes["Completion length"]) == {step: (low[step], high[step]) for step in (1, 2, 3)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_run_that_is_interrupted_has_its_last_curves(error, tmp_path, drawn):
    class Interrupts(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise error

    trainer = drawing(tmp_path, max_steps=9)
    trainer.add_callback(Interrupts())
    with pytest.raises(error):
        trainer.train()
    assert drawn[-1] == (trainer.state.log_history, f"{tmp_path.name}: update 3 of 9") and len(drawn) == 2
    assert Image.open(tmp_path / "training_curves.png").width == 1200


def test_only_the_main_process_draws(tmp_path, drawn):
    class Other(MultimodalGRPOTrainer):
        def is_world_process_zero(self):
            return False

    drawing(tmp_path, Other, max_steps=1).train()
    assert not (tmp_path / "training_curves.png").exists() and not drawn


def test_a_resumed_run_with_no_step_left_counts_the_steps_of_its_checkpoint(tmp_path, drawn):
    state = TrainerState(
        is_world_process_zero=True, global_step=46, max_steps=5, log_history=[{"step": 46, "reward": 1}]
    )
    TrainingCurvesCallback().on_train_end(SimpleNamespace(output_dir=tmp_path), state, None)
    assert drawn[-1][1] == f"{tmp_path.name}: update 46 of 46"


def test_pictures_take_a_fiftieth_of_the_time(tmp_path, drawn, monkeypatch):
    """Each drawing advances the clock by 2 seconds: after the first, none follows for 100 seconds."""
    clock = [1000.0]
    monkeypatch.setattr(curves.time, "perf_counter", lambda: clock[0])

    def slow(figure, path):
        clock[0] += 2

    monkeypatch.setattr(curves, "save_figure", slow)
    callback = TrainingCurvesCallback()
    times = []
    state = TrainerState(is_world_process_zero=True, max_steps=30)

    def after(event, seconds):
        clock[0] += seconds
        start = clock[0]
        n_drawn = len(drawn)
        getattr(callback, event)(SimpleNamespace(output_dir=tmp_path), state, None)
        times.extend([(event, start)] * (len(drawn) - n_drawn))

    after("on_train_begin", 0)
    after("on_log", 0)  # nothing was logged
    for step in range(1, 31):
        state.log_history.append({"step": step, "reward": 0.5})
        after("on_log", 10)
    # An evaluation after the training, and another training
    for event in ("on_train_end", "on_log", "on_train_begin", "on_log", "on_log"):
        after(event, 0)
    ends = ["on_log"] * 3 + ["on_train_end", "on_log", "on_log"]
    assert [event for event, _ in times] == ends and [time for _, time in times[:3]] == [1010, 1112, 1214]


# Files


def test_a_write_that_breaks_leaves_the_old_picture(tmp_path):
    """The disk is full after 10 kB."""
    path = tmp_path / "curves.png"
    curves.save_figure(figure_of([{"step": 1, "reward": 0.5}]), path)
    old = path.read_bytes()
    assert len(old) > 15_000
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            curves.save_figure(figure_of([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0}]), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == old
    assert [*tmp_path.iterdir()] == [path]


def test_training_goes_on_without_a_picture(tmp_path, caplog):
    (tmp_path / "training_curves.png").mkdir()
    trainer = drawing(tmp_path, max_steps=1)
    with caplog.at_level(logging.WARNING, logger=curves.__name__):
        trainer.train()
    assert trainer.state.global_step == 1
    assert "The training curves were not drawn: " in caplog.text
    assert [*tmp_path.iterdir()] == [tmp_path / "training_curves.png"]


def test_without_matplotlib(monkeypatch):
    """The error names the extra that installs it."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (TrainingCurvesCallback, lambda: figure_of([{"step": 1, "reward": 0.5}])):
        with pytest.raises(ImportError, match=r"matplotlib .* `pip install \"trl-multimodal-rft\[plots\]\"`"):
            call()


# README's pictures


IMAGES = ROOT / "docs"
DRAW = runpy.run_path(str(IMAGES / "draw_images.py"))


def test_readme_has_two_panels_for_light_and_dark_pages():
    """The stored curves are what the command draws: reward and ten measurements during training, on no background."""
    stored = (IMAGES / "images" / "training_curves.svg").read_text()
    history = [{"step": 20 * i, "eval_accuracy": i / 10, "entropy": 1.0} for i in range(11)]
    history += [{"step": step, "reward": step / 200, "reward_std": 0.1} for step in range(10, 201, 10)]
    for picture in (stored, DRAW["curves"](history)):
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", picture)
        assert {"Reward", "Held-out accuracy"} <= {*texts} and "Entropy" not in texts
        assert not re.search(r"#(000000|ffffff)\b", picture) and picture.count("#7d8590") > 10
        uses = Counter(re.findall(r'<use xlink:href="#(\w+)"', picture[picture.index('id="axes_2"') :]))
        assert max(uses.values()) == 11  # the points before training and during it; ticks are fewer


def test_console_is_a_picture():
    picture = DRAW["console"]("self-check: \x1b[32mfine\x1b[0m\nstep 10")
    stored = (IMAGES / "images" / "console.svg").read_text()
    assert "self-check:" in picture and "fine" in picture and "self-check:" in stored
    assert not any("url(" in each.replace("url(#", "") or "font-face" in each for each in (picture, stored))
