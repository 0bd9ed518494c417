# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options, table and curve of `reproduce.sh`."""

import json
import re
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from trl_multimodal_rft.cli.options import config_path, read_config


# Options of a recipe that its evaluation has, too
SHARED = ("dataset_name", "min_pixels", "max_pixels", "max_completion_length", "system_prompt")


def settings_of(recipe: str, options: list[str]) -> list[str]:
    """
    The command of a recipe, its model, and the options of an evaluation by its first reward function.

    Args:
        recipe (`str`):
            Name of a recipe of the package, or a YAML file with its comments.
        options (`list[str]`):
            Further options of the training, which may name another model.

    Raises:
        `ValueError`: If there is no such recipe, or if it has no command or no reward function.
    """
    path = config_path("recipes", recipe)
    settings, comments = read_config(path), Path(path).read_text()
    command = re.search(r"^# .*trl-multimodal-rft (\w+) --config", comments, re.MULTILINE)
    if command is None or not settings.get("reward_funcs"):
        raise ValueError(f"{recipe!r} names no command or no `reward_funcs`, by which completions are right.")
    model = settings["model_name_or_path"]
    if "--model_name_or_path" in options:
        model = options[options.index("--model_name_or_path") + 1]
    shared = [word for name in SHARED if name in settings for word in (f"--{name}", str(settings[name]))]
    return [command[1], model, *shared, "--reward_funcs", settings["reward_funcs"][0], "--dtype", "bfloat16"]


def table(before: dict, after: dict[str, dict]) -> str:
    """
    Accuracies as a Markdown table: before training, after the training of each seed, and the mean over seeds.

    Intervals of single models are those of `evaluate`; the mean comes with the standard deviation over seeds.
    """

    def cell(metrics: dict) -> str:
        ends = (metrics.get(f"accuracy_{end}") for end in ("low", "high"))
        return f"{metrics['accuracy']:.1%} | " + " to ".join("?" if end is None else f"{end:.1%}" for end in ends)

    lines = ["| model | accuracy | 95 % interval |", "|---|---|---|", f"| before | {cell(before)} |"]
    lines += [f"| after, {seed} | {cell(metrics)} |" for seed, metrics in after.items()]
    values = [metrics["accuracy"] for metrics in after.values()]
    if len(values) > 1:
        lines.append(f"| after, mean | {statistics.mean(values):.1%} | ± {statistics.stdev(values):.1%} over seeds |")
    return "\n".join([*lines, "", f"Rows: {before['rows']:.0f}"])


def curve(rewards: dict[str, dict[int, float]]) -> Figure:
    """The mean reward of completions by update, a line for each seed."""
    figure = Figure((6, 3), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for seed, values in rewards.items():
        axes.plot(values.keys(), values.values(), label=seed, linewidth=1)
    axes.set(xlabel="update", ylabel="mean reward of completions")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rewards_of(run: Path) -> dict[int, float]:
    """Mean rewards by update, from the last checkpoint of a run."""
    last = max(run.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    history = json.loads(last.read_text())["log_history"]
    return {entry["step"]: entry["reward"] for entry in history if "reward" in entry}


def metrics_of(evaluation: Path) -> dict:
    """Metrics in the results of an evaluation."""
    return json.loads((evaluation / "metrics.json").read_text())["metrics"]


def write_results(folder: Path) -> None:
    """Writes `results.md` and `curve.png`, and prints the table."""
    runs = {run.name: run for run in sorted(folder.glob("seed-*"))}
    text = table(metrics_of(folder / "before"), {seed: metrics_of(run / "after") for seed, run in runs.items()})
    (folder / "results.md").write_text(text + "\n")
    curve({seed: rewards_of(run) for seed, run in runs.items()}).savefig(folder / "curve.png")
    print(text)


if __name__ == "__main__":
    part, name, *words = sys.argv[1:]
    if part == "results":
        write_results(Path(name))
    else:
        try:
            print(*settings_of(name, words), sep="\n")
        except ValueError as error:
            sys.exit(str(error))
